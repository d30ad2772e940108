"""A checkpoint's weights in our model: mapped lazily, read one tensor at a time, packed ones kept packed."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from harness.checkpoints.checkpoint import Checkpoint
from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.plan import Assignment, Source, plan
from harness.checkpoints.safetensors import Tensor
from reference_models.quantised import put_packed, stays_packed

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load_model(
    checkpoint: Checkpoint, dtype: str | None = None, options: Mapping[str, str] | None = None, lazy: bool = False
) -> Any:
    """The reference model with the checkpoint's weights.

    ``dtype``: cast what is not packed (float32 for a CPU that lacks half-precision experts); None keeps what is
    stored. ``options``: of the family's Model. ``lazy``: leave reading to the first use. Peak memory is that of the
    weights and one tensor. CheckpointError names file and key.
    """
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r:.40}")
    model = skeleton(checkpoint, options)
    assignments = plan(checkpoint, model)
    store = _Store(checkpoint, assignments, None if dtype is None else DTYPES[dtype])
    try:
        for assignment in assignments:
            _assign(model, assignment, store, lazy)
        if not lazy:
            mx.eval(model.parameters())
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(f"{checkpoint.path}: cannot be loaded: {error}") from error
    model.eval()
    return model


def check(checkpoint: Checkpoint) -> None:
    """CheckpointError unless every weight is there, in its shape and type, and no other. Reads no weight."""
    plan(checkpoint, skeleton(checkpoint))


def skeleton(checkpoint: Checkpoint, options: Mapping[str, str] | None = None) -> Any:
    """The model without the checkpoint's weights: its own are not computed before somebody uses them."""
    module = importlib.import_module(f"reference_models.{checkpoint.family}")
    try:
        return module.Model(checkpoint.model_config, **(options or {}))
    except (ValueError, TypeError, ArithmeticError) as error:
        raise CheckpointError(f"{checkpoint.config_path}: {error}") from error


class _Store:
    """The lazy arrays of all files; each is forgotten after its last use, so that its buffer can be freed.

    A fused tensor has two uses: gate and up are halves of it.
    """

    def __init__(self, checkpoint: Checkpoint, assignments: Sequence[Assignment], dtype: mx.Dtype | None):
        self._dtype, self.casts = dtype, dtype is not None
        self._uses = Counter(tensor for made in assignments for source in made.sources for tensor in source.tensors)
        self._arrays: dict[Path, dict[str, mx.array]] = {}
        for path in checkpoint.weights.files:
            try:
                self._arrays[path] = cast(dict[str, mx.array], mx.load(str(path), format="safetensors"))
            except (RuntimeError, ValueError, OSError) as error:
                raise CheckpointError(f"{path}: cannot be loaded: {error}") from error

    def raw(self, tensor: Tensor) -> mx.array:
        return self._arrays[tensor.file][tensor.name]

    def floats(self, tensor: Tensor) -> mx.array:
        if self._dtype is not None:  # put back, so that two halves of one tensor share its cast as well
            self._arrays[tensor.file][tensor.name] = self.raw(tensor).astype(self._dtype)
        return self.raw(tensor)

    def forget(self, source: Source) -> None:
        for tensor in source.tensors:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                self._arrays[tensor.file].pop(tensor.name, None)


def _assign(model: Any, assignment: Assignment, store: _Store, lazy: bool) -> None:
    *path, name = assignment.parameter.split(".")
    parent, key = model, ""
    owner = model
    for step in path:
        parent, key = owner, step
        owner = owner[int(step)] if isinstance(owner, list) else owner[step]
    whole, *_ = assignment.sources
    stem = ".".join(path)
    packing = whole.packing
    if packing and assignment.recipe.whole and stays_packed(owner, name, stem):
        weight, scales, biases = (store.raw(whole.tensors[0]), *map(store.floats, whole.tensors[1:]))
        where: Any = int(key) if isinstance(parent, list) else key
        put_packed(parent, where, name, weight, scales, biases, packing)
        made = [weight, scales, biases]
    else:
        array = assignment.recipe.build(*(_unpacked(source, store) for source in assignment.sources))
        owner[name] = array
        made = [array]
    if not lazy and (store.casts or len(assignment.sources) > 1):
        mx.eval(made)  # what was only needed to build this one is freed before the next is read; the rest comes at once
    for source in assignment.sources:
        store.forget(source)


def _unpacked(source: Source, store: _Store) -> mx.array:
    if source.packing is None:
        return store.floats(source.tensors[0])
    weight, scales, biases = source.tensors
    return mx.dequantize(
        store.raw(weight),
        store.floats(scales),
        store.floats(biases),
        group_size=source.packing.group_size,
        bits=source.packing.bits,
    )


#: Unsigned type of the same width, bits of exponent and mantissa, and the pattern where infinities and NaNs begin.
_PATTERNS = {
    mx.float32: (mx.uint32, 0x7FFFFFFF, 0x7F800000),
    mx.float16: (mx.uint16, 0x7FFF, 0x7C00),
    mx.bfloat16: (mx.uint16, 0x7FFF, 0x7F80),
}
_BLOCK = 1 << 20


def not_a_number(model: Any) -> list[str]:
    """Names of the loaded parameters that hold a NaN or an infinity.

    Reads every weight once, as bit patterns and in blocks, which is ten times faster than a reduction in MLX on a CPU.
    """
    found = []
    for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        if array.dtype in _PATTERNS and not _finite(array):
            found.append(name)
    return found


def _finite(array: mx.array) -> bool:
    unsigned, mask, limit = _PATTERNS[array.dtype]
    bits = np.asarray(array.view(unsigned)).reshape(-1)
    block = np.empty(min(_BLOCK, bits.size), dtype=bits.dtype)
    for start in range(0, bits.size, _BLOCK):
        part = bits[start : start + _BLOCK]
        if np.bitwise_and(part, mask, out=block[: part.size]).max() >= limit:
            return False
    return True
