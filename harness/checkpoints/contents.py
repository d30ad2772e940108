"""What the weights of a checkpoint of any model type are, measured on their headers: how many, how packed."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.files import Files


@dataclass(frozen=True)
class Contents:
    """``quantisation``: in words, counted in the weights, None where none is packed; ``parameters``: packed ones
    counted unpacked, scales and biases of packings not at all; ``bytes``: what all takes, in float32 where it is not
    packed."""

    quantisation: str | None
    parameters: int
    bytes: int


def contents(files: Files) -> Contents:
    """Measured on the headers. CheckpointError where the config says that weights are packed and none is, or the
    reverse, or they are packed otherwise than it says."""
    tensors = files.weights.tensors
    stems = (name.removesuffix(".scales") for name in tensors if name.endswith(".scales"))
    packed = {stem for stem in stems if f"{stem}.weight" in tensors and tensors[f"{stem}.weight"].dtype == "U32"}
    said = files.config.get("quantization") or None
    other = files.config.get("quantization_config")
    if said is None and isinstance(other, dict) and "bits" in other and "quant_method" not in other:
        said = other  # of MLX, under the other name
    if isinstance(said, dict) and not packed:
        raise CheckpointError(
            f"{files.config_path}: says that the weights are quantised, but none of them is: there are no scales"
        )
    if packed and not isinstance(said, dict):
        first = tensors[f"{min(packed)}.scales"]
        raise CheckpointError(
            f"{first.file}: key {first.name!r:.200} belongs to a packed weight, but {files.config_path.name} has no "
            "quantization"
        )
    kinds: Counter[str] = Counter()
    parameters = size = 0
    for name, tensor in tensors.items():
        stem, _, part = name.rpartition(".")
        count = math.prod(tensor.shape)
        if stem not in packed or part == "bias":
            parameters, size = parameters + count, size + 4 * count
        elif part == "weight":
            bits, told = _packing(files, said, stem)
            kinds[told] += 1
            parameters += count * 32 // bits
            size += tensor.bytes
        else:
            size += 4 * count
    words = "; ".join(f"{kind} ({number} weights)" for kind, number in kinds.most_common())
    return Contents(f"MLX {words}" if kinds else None, parameters, size)


def _packing(files: Files, said: Any, stem: str) -> tuple[int, str]:
    """Bits of a packed weight, and its packing in words. CheckpointError where its shapes are not what is said."""
    own = said.get(stem)
    packing = own if isinstance(own, dict) else said
    bits, group = packing.get("bits"), packing.get("group_size", 64)
    weight, scales = files.weights.tensors[f"{stem}.weight"], files.weights.tensors[f"{stem}.scales"]
    if type(bits) is not int or type(group) is not int or not (0 < bits <= 32 and group > 0):
        raise CheckpointError(f"{files.config_path}: quantization has no bits and group_size for {stem!r:.200}")
    if weight.shape[-1:] == () or weight.shape[-1] * 32 != scales.shape[-1] * group * bits:
        raise CheckpointError(
            f"{weight.file}: key {weight.name!r:.200} of the shape {list(weight.shape)} with scales "
            f"{list(scales.shape)} is not packed with {bits} bits in groups of {group}, as "
            f"{files.config_path.name} says"
        )
    return bits, f"{packing.get('mode', 'affine')}, {bits} bits, groups of {group}"
