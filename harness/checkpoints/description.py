"""What ``kv-harness identify`` prints."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

from harness.checkpoints.checkpoint import Checkpoint
from harness.checkpoints.fingerprint import Fingerprint
from reference_models.quantised import Packing
from reference_models.registry import OPTIONS, limits

_SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "intermediate_size",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts",
    "num_experts_per_tok",
    "kv_lora_rank",
    "q_lora_rank",
    "tie_word_embeddings",
)


_NO_PROGRAMS = "programs of cache operations: kv-harness validate runs a few, kv-harness run many on tiny models"


def parameters(checkpoint: Checkpoint) -> int:
    """Numbers of the model, packed ones counted unpacked, scales and biases of packings not at all."""
    packed, total = _packed(checkpoint), 0
    for name, tensor in (checkpoint.text | checkpoint.vision).items():
        stem, _, part = name.rpartition(".")
        if stem not in packed or part == "bias":
            total += math.prod(tensor.shape)
        elif part == "weight":
            total += math.prod(tensor.shape) * 32 // packed[stem].bits
    return total


def quantisation(checkpoint: Checkpoint) -> str | None:
    """How the weights that lie there are packed, counted; None where none is. The config may claim anything: ``check``
    refuses it where it is not so."""
    packed = _packed(checkpoint)
    if not packed:
        return None
    kinds = [f"{packing} ({of} weights)" for packing, of in Counter(packed.values()).most_common()]
    matrices = [
        name.removesuffix(".weight")
        for name, tensor in checkpoint.text.items()
        if name.endswith(".weight") and len(tensor.shape) > 1
    ]
    left = sum(name not in packed for name in matrices)
    return f"MLX affine, {'; '.join(kinds)}" + (f"; {left} left unquantised" if left else "")


def _packed(checkpoint: Checkpoint) -> dict[str, Packing]:
    """The packing of every module that has scales, by its canonical name; ``check`` has compared it with the shapes."""
    names = checkpoint.text | checkpoint.vision
    stems = (name.removesuffix(".scales") for name in names if name.endswith(".scales"))
    said = checkpoint.quantisation
    found = {stem: None if said is None else said.of(stem) for stem in stems if f"{stem}.weight" in names}
    return {stem: packing for stem, packing in found.items() if packing is not None}


def describe(checkpoint: Checkpoint, digests: Fingerprint) -> str:
    """Family, variant, quantisation, sizes, fingerprint, and what can be checked; aligned lines."""
    config = checkpoint.model_config
    sizes = {name: getattr(config, name) for name in _SIZES if hasattr(config, name)}
    kinds = ", ".join(f"{dtype} x {count}" for dtype, count in checkpoint.dtypes.items())
    weights = checkpoint.weights
    rows = [
        ("checkpoint", checkpoint.name),
        ("family", checkpoint.family),
        ("variant", variant(checkpoint)),
        ("quantisation", quantisation(checkpoint) or "none"),
        ("parameters", f"{parameters(checkpoint):,}"),
        (
            "weights",
            f"{weights.bytes:,} bytes in {len(weights.files)} file(s), {len(weights.tensors)} tensors: {kinds}",
        ),
        ("vision", _vision(checkpoint)),
        *((name, str(value)) for name, value in sizes.items()),
        ("fingerprint", f"sha256:{digests.digest}"),
        *((f"  {name}", digest) for name, digest in digests.files.items()),
        *(("checks", text) for text in _checks(checkpoint)),
        *(("not checked", text) for text in _unchecked(checkpoint)),
        *(("note", note) for note in checkpoint.notes),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def variant(checkpoint: Checkpoint) -> str:
    """What tells this model from others of its family: its own type, and the layers that have attention or windows."""
    config, said = checkpoint.model_config, f"model_type {checkpoint.config.get('model_type')}"
    attention = getattr(config, "attention_layers", None)
    if attention is not None:
        said += f", attention in {len(attention)} of {config.num_hidden_layers} layers"
    if any(windows := getattr(config, "windows", ())):
        wide = [window for window in windows if window]
        said += f", a sliding window of {wide[0]} tokens in {len(wide)} of {config.num_hidden_layers} layers"
    return said


def _checks(checkpoint: Checkpoint) -> list[str]:
    options = [", ".join(f"{k}={v}" for k, v in option.items()) for option in OPTIONS.get(checkpoint.family, ())]
    what = "text logits of the reference engine"
    images = ["logits behind images and videos, of the reference engine"] * _sees(checkpoint)
    return [f"{what} ({'; '.join(options)})" if options else what, *images]


def _sees(checkpoint: Checkpoint) -> bool:
    """Whether our model of it takes images."""
    return getattr(checkpoint.model_config, "vision", None) is not None


def _vision(checkpoint: Checkpoint) -> str:
    if not checkpoint.vision:
        return "none"
    read = "" if _sees(checkpoint) else ", counted only: no model here reads them"
    return f"{len(checkpoint.vision)} tensors{read}"


def _unchecked(checkpoint: Checkpoint) -> list[str]:
    if not checkpoint.vision and not _asks_for_images(checkpoint.config):
        return [_NO_PROGRAMS]
    blind = [] if _sees(checkpoint) or checkpoint.vision else ["images: the weights hold no vision tower"]
    return [*blind, *(limit for limit in limits(checkpoint.family) if not limit.startswith("programs")), _NO_PROGRAMS]


def _asks_for_images(config: dict[str, Any]) -> bool:
    return "vision_config" in config


def as_dict(checkpoint: Checkpoint, digests: Fingerprint) -> dict[str, Any]:
    """The same for a machine: JSON-able."""
    return {
        "name": checkpoint.name,
        "family": checkpoint.family,
        "variant": variant(checkpoint),
        "quantisation": quantisation(checkpoint),
        "config": dataclasses.asdict(checkpoint.model_config),
        "parameters": parameters(checkpoint),
        "bytes": checkpoint.weights.bytes,
        "vision_tensors": len(checkpoint.vision),
        "images": _sees(checkpoint),
        "checks": _checks(checkpoint),
        "not_checked": _unchecked(checkpoint),
        "fingerprint": {"sha256": digests.digest, "files": dict(digests.files)},
        "notes": list(checkpoint.notes),
    }
