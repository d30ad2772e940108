"""Which tensors of a checkpoint make which parameters of the model; every shape and type checked, nothing read.

An error here comes before any weight is allocated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from harness.checkpoints.checkpoint import FLOATS, Checkpoint
from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.safetensors import Tensor
from reference_models.hf.names import Recipe, Shape, recipe
from reference_models.quantised import BITS, GROUP_SIZES, Packing


@dataclass(frozen=True)
class Source:
    """One part of a parameter: a tensor, or (with ``packing``) a packed weight, its scales and its biases."""

    tensors: tuple[Tensor, ...]
    packing: Packing | None = None


@dataclass(frozen=True)
class Assignment:
    """One parameter of the model and its sources."""

    parameter: str
    recipe: Recipe
    sources: tuple[Source, ...]


def plan(checkpoint: Checkpoint, model: Any) -> tuple[Assignment, ...]:
    """Every parameter's sources, in the order of the model. CheckpointError: missing, unexpected, wrong shape or type.

    Vision weights take part if the model has a place for a tower (``visual``); a family without one only counts them.
    """
    wanted = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
    have = dict(checkpoint.text)
    if hasattr(model, "visual"):
        have |= checkpoint.vision
    shapes = {name: tensor.shape for name, tensor in have.items()}
    used: set[str] = set()
    assignments = []
    for parameter, array in wanted:
        made = recipe(parameter, tuple(array.shape), checkpoint.model_config, shapes)
        sources = tuple(
            _source(checkpoint, have, part, shape, used) for part, shape in zip(made.parts, made.shapes, strict=True)
        )
        assignments.append(Assignment(parameter, made, sources))
    for name, tensor in have.items():
        if name not in used:
            raise CheckpointError(f"{tensor.file}: unexpected key {tensor.name!r:.200}; the model has no such weight")
    _check_packed(checkpoint, have)
    return tuple(assignments)


def _source(checkpoint: Checkpoint, have: dict[str, Tensor], part: str, shape: Shape, used: set[str]) -> Source:
    tensor = have.get(part)
    if tensor is None:
        folder = checkpoint.weights.files[0] if len(checkpoint.weights.files) == 1 else checkpoint.path
        raise CheckpointError(f"{folder}: missing key {part!r:.200} (the prefix of the layout aside)")
    used.add(part)
    stem = part.removesuffix(".weight")
    scales = have.get(f"{stem}.scales") if part.endswith(".weight") else None
    if scales is None:
        if tensor.dtype not in FLOATS:
            raise CheckpointError(
                f"{tensor.file}: key {tensor.name!r:.200} is {tensor.dtype}; unquantised weights are one of "
                f"{', '.join(FLOATS)}"
            )
        _check_shape(tensor, shape)
        return Source((tensor,))
    biases = have.get(f"{stem}.biases")
    if biases is None:
        raise CheckpointError(f"{scales.file}: missing key {f'{stem}.biases'!r:.200}, which affine quantisation needs")
    used |= {f"{stem}.scales", f"{stem}.biases"}
    packing = _packing(checkpoint, stem, shape, tensor, scales)
    if tensor.dtype != "U32":
        raise CheckpointError(
            f"{tensor.file}: key {tensor.name!r:.200} has scales, so it must be U32, not {tensor.dtype}"
        )
    for other in (scales, biases):
        if other.dtype not in FLOATS:
            raise CheckpointError(f"{other.file}: key {other.name!r:.200} is {other.dtype}, not {', '.join(FLOATS)}")
        _check_shape(other, packing.grouped(shape))
    _check_shape(tensor, packing.packed(shape))
    return Source((tensor, scales, biases), packing)


def _packing(checkpoint: Checkpoint, stem: str, shape: Shape, weight: Tensor, scales: Tensor) -> Packing:
    """The packing that the shapes show. CheckpointError when there is none, or the config names another one."""
    quantisation, name = checkpoint.quantisation, scales.name
    if quantisation is None:
        raise CheckpointError(f"{scales.file}: unexpected key {name!r:.200}: the config has no quantization")
    if stem in quantisation.layers and quantisation.layers[stem] is None:
        raise CheckpointError(f"{scales.file}: unexpected key {name!r:.200}: the config leaves this layer unquantised")
    width = shape[-1]
    packed, groups = (tensor.shape[-1] if tensor.shape else 0 for tensor in (weight, scales))
    bits = packed * 32 // width
    group = width // groups if groups else 0
    if bits not in BITS or packed * 32 != bits * width or group not in GROUP_SIZES or groups * group != width:
        raise CheckpointError(
            f"{weight.file}: key {weight.name!r:.200} has the wrong shape: {list(weight.shape)} with scales "
            f"{list(scales.shape)} is no packing of {list(shape)}"
        )
    shown = Packing(bits, group)
    named = quantisation.of(stem)
    if named != shown:
        raise CheckpointError(
            f"{weight.file}: key {weight.name!r:.200} is packed with {bits} bits in groups of {group}; the config says "
            f"{named}"
        )
    return shown


def _check_shape(tensor: Tensor, shape: Shape) -> None:
    if tensor.shape != shape:
        raise CheckpointError(
            f"{tensor.file}: key {tensor.name!r:.200} has the wrong shape {list(tensor.shape)}; the config makes it "
            f"{list(shape)}"
        )


def _check_packed(checkpoint: Checkpoint, have: dict[str, Tensor]) -> None:
    """CheckpointError where the config says quantised, of a layer or of the whole, and the weights are not."""
    if checkpoint.quantisation is None:
        return
    for stem, packing in checkpoint.quantisation.layers.items():
        weight = have.get(f"{stem}.weight")
        if packing is not None and weight is not None and f"{stem}.scales" not in have:
            raise CheckpointError(
                f"{weight.file}: missing key {f'{stem}.scales'!r:.200}: the config says this layer is quantised"
            )
    if not any(name.endswith(".scales") for name in have):
        raise CheckpointError(
            f"{checkpoint.config_path}: says that the weights are quantised ({checkpoint.quantisation.default}), but "
            "none of them is: there are no scales"
        )
