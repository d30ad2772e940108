"""Checkpoints with the widths, heads and experts of the published models, one layer of each kind: written, loaded, run.

Up to 2 GB of memory and some seconds each, so they run only when asked for: ``pytest -m published``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness.checkpoints import CheckpointError, Inputs, load_model, logits, open_checkpoint, synthesise
from reference_models.hf.sizes import SIZES
from reference_models.registry import FAMILIES
from tests.checkpoints.prompts import prompt

#: Their experts multiply in half precision, which MLX does not do on a CPU.
EXPERTS = ("mistral4", "qwen3_vl_moe")


def one_layer(family: str) -> Any:
    """The published sizes, cut to one layer; all 128 experts of mistral4 would take 6 GB, those of qwen3_vl_moe 1.2."""
    config = SIZES["published"][family]()
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "nemotron_nas":  # a layer without attention and with a narrower feed-forward, then attention alone
        first, *_, last = config.block_configs
        first = dataclasses.replace(first, ffn=dataclasses.replace(first.ffn, ffn_mult=0.5))
        changes = {"num_hidden_layers": 2, "block_configs": (first, last)}
    if tower := getattr(config, "vision", None):
        deepstack = {} if family == "qwen2_vl" else {"deepstack_visual_indexes": (0,)}
        changes["vision"] = dataclasses.replace(tower, depth=1, **deepstack)
    return dataclasses.replace(config, **changes)


@pytest.mark.published
@pytest.mark.parametrize("family", FAMILIES)
def test_a_layer_of_published_size_is_loaded_and_runs(family: str, tmp_path: Path) -> None:
    config = one_layer(family)
    synthesise(family, tmp_path / "c", sizes="published", config=config)
    checkpoint = open_checkpoint(tmp_path / "c")
    assert set(checkpoint.dtypes) == {"BF16"} and checkpoint.weights.bytes < 1.5e9
    inputs = Inputs(np.arange(12)[None])
    if getattr(config, "vision", None):
        inputs = prompt(config, "image")
        assert checkpoint.model_config == config
    model = load_model(checkpoint)
    if family in EXPERTS and mx.default_device() == mx.Device(mx.cpu):
        with pytest.raises(CheckpointError, match=r"^the model cannot run here: .*; try --dtype float32$"):
            logits(model, inputs)
        del model
        mx.clear_cache()
        model = load_model(checkpoint, "float32")
    made = logits(model, inputs)
    assert made.shape == (*inputs.ids.shape, 4096) and np.isfinite(made).all() and made.std() > 0.3
    if inputs.has_images:  # the tower is part of it
        assert inputs.pixel_values is not None
        other = logits(model, dataclasses.replace(inputs, pixel_values=-inputs.pixel_values))
        assert np.abs(made - other).max() > 0.05 * made.std()
