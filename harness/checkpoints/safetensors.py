"""The header of a safetensors file, checked before any weight is read.

Format (github.com/huggingface/safetensors, "Format"): 8 bytes, little-endian length N of the header; N bytes of JSON,
``{name: {"dtype", "shape", "data_offsets": [begin, end]}}`` with offsets from the end of the header, and optionally
``__metadata__`` (text to text); then the data, without holes.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoints.errors import CheckpointError, open_regular, parse_json

#: Bits per element of every type of the format.
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
MOST_HEADER_BYTES = 100_000_000  # as in the published readers
MOST_DIMENSIONS = 16


@dataclass(frozen=True)
class Tensor:
    """One entry: where it is (bytes from the start of the data) and what it holds."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


def read_header(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, by name. CheckpointError, naming file and key, when header and file do not fit."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointError(f"{path}: truncated: {size} bytes are too few for a safetensors file")
            length = int.from_bytes(head, "little")
            if length > size - 8:
                raise CheckpointError(f"{path}: the header claims {length:,} bytes, but only {size - 8:,} follow")
            if length > MOST_HEADER_BYTES:
                raise CheckpointError(f"{path}: a header of {length:,} bytes is larger than the format allows")
            raw = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    header = parse_json(raw, f"{path}: the header")
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header must be a JSON object")
    metadata = header.pop("__metadata__", None)  # null is what MLX writes when there is none
    texts = metadata.values() if isinstance(metadata, dict) else (None,)
    if metadata is not None and not all(isinstance(text, str) for text in texts):
        raise CheckpointError(f"{path}: __metadata__ of the header must map text to text; write the file anew")
    tensors = {name: _tensor(path, name, entry) for name, entry in header.items()}
    _check_extents(path, tensors, size - 8 - length)
    return tensors


def _tensor(path: Path, name: str, entry: Any) -> Tensor:
    where = f"{path}: key {name!r:.200}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= set(entry):
        raise CheckpointError(f"{where}: needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{where}: unknown dtype {dtype!r:.40}")
    if not isinstance(shape, list) or len(shape) > MOST_DIMENSIONS or not all(type(n) is int for n in shape):
        raise CheckpointError(f"{where}: shape must be a list of at most {MOST_DIMENSIONS} whole numbers")
    if any(n < 0 for n in shape) or any(n >= 1 << 31 for n in shape):
        raise CheckpointError(f"{where}: shape {shape} has a negative or absurd size")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise CheckpointError(f"{where}: data_offsets must be two whole numbers")
    begin, end = offsets
    if not 0 <= begin <= end:
        raise CheckpointError(f"{where}: data_offsets {offsets} do not begin before they end")
    needed = math.prod(shape) * DTYPE_BITS[dtype] // 8
    if end - begin != needed:
        raise CheckpointError(f"{where}: {dtype} {shape} needs {needed:,} bytes, data_offsets give {end - begin:,}")
    return Tensor(path, name, dtype, tuple(shape), begin, end)


def _check_extents(path: Path, tensors: dict[str, Tensor], held: int) -> None:
    """CheckpointError unless the tensors fill the ``held`` bytes of data without hole or overlap."""
    at = 0
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
        if tensor.end > held:
            raise CheckpointError(
                f"{path}: truncated: key {tensor.name!r:.200} ends at byte {tensor.end:,} of the data, "
                f"the file has {held:,}"
            )
        if tensor.begin != at:
            what = "overlaps the one before it" if tensor.begin < at else "leaves a hole before it"
            raise CheckpointError(
                f"{path}: key {tensor.name!r:.200} begins at byte {tensor.begin:,} and {what} ({at:,})"
            )
        at = tensor.end
    if at != held:
        raise CheckpointError(f"{path}: {held - at:,} bytes follow the last tensor")
