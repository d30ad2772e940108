"""The ``quantization`` of an MLX config: defaults, per-layer overrides, exceptions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.checkpoints.errors import CheckpointError
from reference_models.hf.names import canonical
from reference_models.quantised import BITS, GROUP_SIZES, Packing


@dataclass(frozen=True)
class Quantisation:
    """Default packing, and what the config says of single modules (canonical name -> packing, None = left alone)."""

    default: Packing
    layers: dict[str, Packing | None]

    def of(self, module: str) -> Packing | None:
        """What the config says of a module, by its canonical name."""
        return self.layers.get(module, self.default)


def read_quantisation(config: dict[str, Any], where: str) -> Quantisation | None:
    """The quantisation of a config, if any. CheckpointError for a kind that is not MLX's affine one."""
    data = config.get("quantization")
    title = "quantization"
    if data is None:
        data, title = config.get("quantization_config"), "quantization_config"
    if data is None and isinstance(inner := config.get("text_config"), dict):
        data, title = inner.get("quantization_config"), "text_config.quantization_config"
    if data is None:
        return None
    if not isinstance(data, dict):
        raise CheckpointError(f"{where}: {title} must be an object")
    if "bits" not in data or "quant_method" in data:
        kind = data.get("quant_method", "unnamed")
        raise CheckpointError(f"{where}: {title} is of the kind {kind!r:.40}; only MLX affine quantisation is handled")
    default = _packing(data, where, title)
    layers: dict[str, Packing | None] = {}
    for name, value in data.items():
        if name in {"bits", "group_size", "mode", "linear_class", "quantize_embeddings"}:
            continue
        if value is False:
            layers[_module(name)] = None
        elif value is True:
            layers[_module(name)] = default
        elif isinstance(value, dict):
            layers[_module(name)] = _packing(value, where, f"{title}.{name}")
        else:
            raise CheckpointError(f"{where}: {title}.{name:.200} must be an object, true or false, not {value!r:.40}")
    return Quantisation(default, layers)


def _packing(data: dict[str, Any], where: str, title: str) -> Packing:
    mode = data.get("mode", "affine")
    if mode != "affine":
        raise CheckpointError(f"{where}: {title}.mode is {mode!r:.40}; only affine quantisation is handled")
    bits, group = data.get("bits"), data.get("group_size", 64)
    if type(bits) is not int or bits not in BITS:
        raise CheckpointError(f"{where}: {title}.bits is one of {', '.join(map(str, BITS))}, not {bits!r:.40}")
    if type(group) is not int or group not in GROUP_SIZES:
        known = ", ".join(map(str, GROUP_SIZES))
        raise CheckpointError(f"{where}: {title}.group_size is one of {known}, not {group!r:.40}")
    return Packing(bits, group)


def _module(name: str) -> str:
    return canonical(name + ".").removesuffix(".")
