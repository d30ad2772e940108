"""A checkpoint's weights in our model: mapped lazily, read one tensor at a time, packed ones kept packed."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from harness.checkpoints.checkpoint import Checkpoint
from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.plan import Assignment, Source, plan
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
    model = _build(checkpoint, options or {})
    assignments = plan(checkpoint, model)
    store = _Store(checkpoint, None if dtype is None else DTYPES[dtype])
    for assignment in assignments:
        _assign(model, assignment, store, lazy)
    model.eval()
    return model


def check(checkpoint: Checkpoint) -> None:
    """CheckpointError unless every weight is there, in its shape and type, and no other. Reads no weight."""
    plan(checkpoint, _build(checkpoint, {}))


def _build(checkpoint: Checkpoint, options: Mapping[str, str]) -> Any:
    module = importlib.import_module(f"reference_models.{checkpoint.family}")
    try:
        return module.Model(checkpoint.model_config, **options)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.config_path}: {error}") from error


class _Store:
    """The lazy arrays of all files; each is handed out once and then forgotten, so that its buffer can be freed."""

    def __init__(self, checkpoint: Checkpoint, dtype: mx.Dtype | None):
        self._dtype = dtype
        self._arrays: dict[Path, dict[str, mx.array]] = {}
        for path in checkpoint.weights.files:
            try:
                self._arrays[path] = cast(dict[str, mx.array], mx.load(str(path), format="safetensors"))
            except (RuntimeError, ValueError, OSError) as error:
                raise CheckpointError(f"{path}: cannot be loaded: {error}") from error

    def raw(self, tensor: Any) -> mx.array:
        return self._arrays[tensor.file][tensor.name]

    def floats(self, tensor: Any) -> mx.array:
        if self._dtype is not None:  # put back, so that two halves of one tensor share its cast as well
            self._arrays[tensor.file][tensor.name] = self.raw(tensor).astype(self._dtype)
        return self.raw(tensor)

    def forget(self, source: Source) -> None:
        for tensor in (source.weight, source.scales, source.biases):
            if tensor is not None:
                self._arrays[tensor.file].pop(tensor.name, None)


def _assign(model: Any, assignment: Assignment, store: _Store, lazy: bool) -> None:
    *path, name = assignment.parameter.split(".")
    parent, key = model, ""
    owner = model
    for step in path:
        parent, key = owner, step
        owner = owner[int(step)] if isinstance(owner, list) else owner[step]
    first = assignment.sources[0]
    stem = ".".join(path)
    if first.packing and assignment.recipe.whole and stays_packed(owner, name, stem):
        scales, biases = store.floats(first.scales), store.floats(first.biases)
        weight = store.raw(first.weight)
        where: Any = int(key) if isinstance(parent, list) else key
        put_packed(parent, where, name, weight, scales, biases, first.packing)
        made = [weight, scales, biases]
    else:
        array = assignment.recipe.build(*(_unpacked(source, store) for source in assignment.sources))
        owner[name] = array
        made = [array]
    if not lazy:
        mx.eval(made)
    if name != "gate_proj":  # gate and up may be halves of one tensor: it stays until both have taken theirs
        for source in assignment.sources:
            store.forget(source)


def _unpacked(source: Source, store: _Store) -> mx.array:
    if source.packing is None:
        return store.floats(source.weight)
    return mx.dequantize(
        store.raw(source.weight),
        store.floats(source.scales),
        store.floats(source.biases),
        group_size=source.packing.group_size,
        bits=source.packing.bits,
    )


def not_a_number(model: Any) -> list[str]:
    """Names of the loaded parameters that hold a NaN or an infinity. Reads every weight once, one at a time."""
    found = []
    for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        if mx.issubdtype(array.dtype, mx.floating):
            ends = mx.stack([array.min(), array.max()])
            if not mx.isfinite(ends.astype(mx.float32)).all().item():
                found.append(name)
    return found
