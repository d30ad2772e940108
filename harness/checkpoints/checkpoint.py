"""What a checkpoint is, decided from its config and its weight names; nothing of its weights is read for that."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.files import Files, read_config
from harness.checkpoints.locate import locate
from harness.checkpoints.quantisation import Quantisation, read_quantisation
from harness.checkpoints.safetensors import Tensor
from harness.checkpoints.weights import read_weights
from reference_models.hf import ConfigError, claimed_families, config_from_json, contradiction
from reference_models.hf.names import DERIVED, canonical, is_vision

#: Types that a weight may have; U32 only where it is packed.
FLOATS = ("F32", "F16", "BF16")
MOST_AHEAD = 16  # published are one or two
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Checkpoint(Files):
    """An identified checkpoint: files checked, family settled, weights unread.

    ``text`` and ``vision`` map canonical names to tensors; ``notes`` are for a reader.
    """

    name: str
    family: str
    model_config: Any
    quantisation: Quantisation | None
    text: dict[str, Tensor]
    vision: dict[str, Tensor]
    notes: tuple[str, ...]


def open_checkpoint(where: str | Path, revision: str = "main") -> Checkpoint:
    """Find, check and identify a checkpoint (a directory or a hub id). CheckpointError names file and key."""
    location = locate(str(where), revision)
    path = location.path
    config_path = path / "config.json"
    config, raw = read_config(path)
    try:
        # Once without the weights: an unknown model is said before a broken shard of it. Its tower waits for them.
        config_from_json(config, has_vision=False)
    except ConfigError as error:
        raise CheckpointError(f"{config_path}: {error}{_called(location.name)}") from error
    weights = read_weights(path)
    text, vision = _sort(weights.tensors.values())
    has_lm_head = "lm_head.weight" in text
    try:
        family, model_config, notes = config_from_json(config, has_lm_head, bool(vision))
    except ConfigError as error:
        raise CheckpointError(f"{config_path}: {error}{_called(location.name)}") from error
    notes += _without_layers_ahead(text, config, model_config.num_hidden_layers)
    _check_identity(config_path, family, model_config, text, location.name)
    if has_lm_head and model_config.tie_word_embeddings:
        tensor = text.pop("lm_head.weight")
        for packed in ("lm_head.scales", "lm_head.biases"):
            text.pop(packed, None)
        notes += (f"{tensor.name} is not used: the config ties the output to the embedding",)
    return Checkpoint(
        path=path,
        name=location.name,
        config=config,
        config_bytes=raw,
        family=family,
        model_config=model_config,
        quantisation=read_quantisation(config, str(config_path)),
        weights=weights,
        text=text,
        vision=vision,
        notes=notes,
    )


def _sort(tensors: Iterable[Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Text and vision tensors by canonical name. CheckpointError if two names mean the same weight."""
    text: dict[str, Tensor] = {}
    vision: dict[str, Tensor] = {}
    for tensor in tensors:
        name = canonical(tensor.name)
        if DERIVED.search(name):
            continue
        side = vision if is_vision(name) else text
        if name in side:
            other = side[name]
            raise CheckpointError(
                f"{tensor.file}: duplicate key {tensor.name!r:.200}: {other.name!r:.200} in {other.file.name} "
                "is the same weight"
            )
        side[name] = tensor
    return text, vision


def _without_layers_ahead(text: dict[str, Tensor], config: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Drops the weights of the layers that the config counts apart (``num_nextn_predict_layers``): they stand behind
    the last one and guess further tokens, and no model here has them."""
    count = config.get("num_nextn_predict_layers")
    if type(count) is not int or count < 1:
        return ()
    last = layers + min(count, MOST_AHEAD)
    ahead = [name for name in text if (match := _LAYER.match(name)) and layers <= int(match[1]) < last]
    for name in ahead:
        del text[name]
    told = f"num_nextn_predict_layers is {count}: {len(ahead)} weights of layers that guess further tokens are not used"
    return (told,) if ahead else ()


def _check_identity(path: Path, family: str, config: Any, text: dict[str, Tensor], name: str) -> None:
    wrong = contradiction(family, text)
    if wrong:
        raise CheckpointError(f"{path}: {wrong}{_called(name)}")
    claimed = claimed_families(name)
    if claimed and family not in claimed:
        raise CheckpointError(
            f"{path.parent}: is called {name!r:.100}, which says {' or '.join(claimed)}, but config and weights are of "
            f"{family}; rename it if its content is what you mean"
        )
    deepest = max((int(match[1]) for key in text if (match := _LAYER.match(key))), default=-1)
    if deepest >= config.num_hidden_layers:
        key = next(tensor.name for key, tensor in text.items() if key.startswith(f"model.layers.{deepest}."))
        raise CheckpointError(
            f"{path}: num_hidden_layers is {config.num_hidden_layers}, but there is an unexpected key {key!r:.200}"
        )


def _called(name: str) -> str:
    """A remark for an error, when the name claims what the content is not."""
    claimed = claimed_families(name)
    return f" (it is called {name!r:.100}, which says {' or '.join(claimed)}: a name proves nothing)" if claimed else ""
