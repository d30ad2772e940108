"""Checkpoints made up on the spot, in either layout, with everything that other loaders look for.

Weights are drawn tensor by tensor and written shard by shard: memory is that of one shard.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.loading import DTYPES
from harness.checkpoints.tokenizer import generation_config, tokenizer_files
from harness.checkpoints.weights import INDEX
from reference_models.hf.layouts import LAYOUTS, config_to_json, default_layout, pack, weights_in
from reference_models.hf.processors import processor_files
from reference_models.hf.sizes import SIZES
from reference_models.quantised import BITS, Packing
from reference_models.registry import variants
from reference_models.weights import draw

SHARD_BYTES = 5 << 30
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def synthesise(
    family: str,
    folder: Path,
    *,
    bits: int | None = None,
    seed: int = 0,
    layout: str | None = None,
    sizes: str = "tiny",
    dtype: str | None = None,
    config: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint of ``family`` with the random weights of ``seed`` into a new or empty folder.

    ``bits``: packed by MLX, which only its own layout has. ``sizes``: tiny, published (few layers), or heads
    (published heads, narrow otherwise). ``dtype``: bfloat16 for published ones, float32 for others. ``config`` replaces
    ``sizes``. Raises CheckpointError, and UnknownFamily with the nearest names.
    """
    variants(family)  # raises for an unknown one
    chosen = layout or ("mlx" if bits is not None else default_layout(family))
    if chosen not in LAYOUTS:
        raise CheckpointError(f"layout is one of {', '.join(LAYOUTS)}, not {chosen!r:.40}")
    if bits is not None and bits not in BITS:
        raise CheckpointError(f"bits is one of {', '.join(map(str, BITS))}, not {bits!r:.40}")
    if bits is not None and chosen != "mlx":
        raise CheckpointError(f"quantised weights (bits {bits}) exist in the mlx layout only")
    if sizes not in SIZES:
        raise CheckpointError(f"sizes is one of {', '.join(SIZES)}, not {sizes!r:.40}")
    dtype = dtype or ("bfloat16" if sizes == "published" else "float32")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r:.40}")
    config = config if config is not None else SIZES[sizes][family]()
    packing = None if bits is None else Packing(bits, 64 if sizes == "published" else 32)
    made: list[Path] = []
    try:
        str(folder).encode()  # ValueError: MLX takes no path that is not Unicode
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CheckpointError(f"{folder}: exists and is not an empty directory")
        _make_folders(folder, made)
        _write(_Files(folder, made), family, config, chosen, seed, dtype, packing, shard_bytes)
    except BaseException as error:
        _remove(made)
        # MLX raises RuntimeError for a disk that is full; ValueError is of a path that no file system takes.
        if isinstance(error, (OSError, RuntimeError, ValueError)):
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{str(folder)!s:.200}: cannot be written: {reason!s:.300}") from error
        raise


def _make_folders(folder: Path, made: list[Path]) -> None:
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(absent):
        path.mkdir(exist_ok=True)
        made.append(path)


def _remove(made: list[Path]) -> None:
    """Files and folders, the last one first; a folder in which another has put something stays."""
    for path in reversed(made):
        with contextlib.suppress(OSError):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Files:
    """Writes files into a folder; notes in ``made`` what there is to remove, before there is anything."""

    folder: Path
    made: list[Path]

    def new(self, name: str) -> Path:
        self.made.append(self.folder / name)
        return self.made[-1]

    def text(self, name: str, content: str) -> None:
        self.new(name).write_text(content)

    def json(self, name: str, data: Any) -> None:
        self.text(name, json.dumps(data, indent=2, ensure_ascii=True) + "\n")


def _write(
    files: _Files,
    family: str,
    config: Any,
    layout: Any,
    seed: int,
    dtype: str,
    packing: Packing | None,
    shard_bytes: int,
) -> None:
    said: dict[str, Any] = {}
    placed: dict[str, int] = {}
    shard: dict[str, mx.array] = {}
    count = total = held = 0
    for weights in _layers(family, config, seed):
        made = {name: array.astype(DTYPES[dtype]) for name, array in weights.items()}
        made = weights_in(layout, family, config, made)
        if packing is not None:
            made, more = pack(made, packing)
            said |= more
        size = sum(array.nbytes for array in made.values())
        if shard and held + size > shard_bytes:
            count, shard, held = _flush(files, count, shard, placed), {}, 0
        shard |= made
        held, total = held + size, total + size
    count = _flush(files, count, shard, placed)
    names = _name_shards(files, count)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {key: names[n] for key, n in sorted(placed.items())}}
        files.json(INDEX, index)
    data = config_to_json(family, config, dtype)
    if said:
        data |= {"quantization": said, "quantization_config": said}
    files.json("config.json", data)
    files.json("generation_config.json", generation_config())
    words = tokenizer_files(config.vocab_size)
    for name, content in (words | processor_files(family, config) if words else {}).items():
        if isinstance(content, str):
            files.text(name, content)
        else:
            files.json(name, content)


def _layers(family: str, config: Any, seed: int) -> Iterator[dict[str, mx.array]]:
    """Our parameters, one layer (or what stands outside of the layers) at a time; drawn when they are evaluated."""
    model = importlib.import_module(f"reference_models.{family}").Model(config)
    groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        match = _LAYER.match(name)
        groups.setdefault(match[1] if match else name.split(".")[0], []).append((name, tuple(array.shape)))
    for parameters in groups.values():
        yield {name: draw(name, shape, seed) for name, shape in parameters}


def _flush(files: _Files, number: int, shard: dict[str, mx.array], placed: dict[str, int]) -> int:
    mx.save_safetensors(str(files.new(_part(number))), shard, metadata={"format": "pt"})
    placed |= dict.fromkeys(shard, number)
    return number + 1


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _name_shards(files: _Files, count: int) -> list[str]:
    """The parts under the names that loaders expect, now that their number is known."""
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        (files.folder / _part(number)).rename(files.new(name))
    return names
