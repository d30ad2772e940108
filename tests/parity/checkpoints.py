"""The directory that both sides load: written by the peer's own library where it can, else by ours as published."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from harness.checkpoints import check, load_model, open_checkpoint
from reference_models.drawing import VISION_FAMILIES
from reference_models.hf.layouts import config_to_json, default_layout, weights_in
from reference_models.weights import draw
from tests.parity.cases import Case, special_tokens

CORRECTION = "e_score_correction_bias"


def config_json(case: Case) -> dict[str, Any]:
    """The config.json of a case, in the dialect of its publishers, which transformers, mlx-lm and mlx-vlm read."""
    data = config_to_json(case.family, case.config, "float32")
    text = data.get("text_config", data)
    text |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # a drawn vocabulary is too small for them
    if case.family in VISION_FAMILIES:
        data |= special_tokens(case.config)
    return data


def write(case: Case, folder: Path) -> None:
    """Our random weights and the config in the layout of the publishers (nemotron_nas: of mlx-lm)."""
    folder.mkdir()
    model = importlib.import_module(f"reference_models.{case.family}").Model(case.config)
    drawn = {name: draw(name, tuple(old.shape), case.seed) for name, old in tree_flatten(model.parameters())}
    # mlx-lm hides groups of experts by a score of 0, which a negative score of an open group would lie below. Whether
    # there is one depends on the weights, so it is no entry of ``limitations``, and kept out here.
    drawn = {name: mx.abs(array) if name.endswith(CORRECTION) else array for name, array in drawn.items()}
    made = weights_in(default_layout(case.family), case.family, case.config, drawn)
    made = {name: mx.contiguous(array) for name, array in made.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), made, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config_json(case), indent=2))


def load(case: Case, folder: Path) -> Any:
    """Our model with the weights of a directory, through the checks that any checkpoint gets."""
    checkpoint = open_checkpoint(folder)
    check(checkpoint)
    assert checkpoint.family == case.family
    return load_model(checkpoint, options=case.options)
