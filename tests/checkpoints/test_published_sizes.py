"""Checkpoints with the widths, heads and experts of the published models, one layer of each kind: written, loaded, run.

Up to 2 GB of memory and some seconds each, so they run only when asked for: ``pytest -m published``.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness.checkpoints import CheckpointError, Inputs, load_model, logits, open_checkpoint, synthesise
from reference_models.hf.sizes import SIZES
from reference_models.registry import FAMILIES
from tests.checkpoints.engines import MLX_VLM, PARITY, agree, with_mlx_vlm, with_transformers
from tests.checkpoints.prompts import prompt

pytestmark = pytest.mark.published

#: Their experts multiply in half precision, which MLX does not do on a CPU.
EXPERTS = ("glm4_moe_lite", "mistral4", "qwen3_vl_moe")
#: Of the deviation of the logits. A tied embedding puts a token's own logit 32 deviations out, where float32 rounds by
#: 7e-5 (against float64; transformers by 9e-6); every other logit differs by less than 2e-5.
WIDE = 2e-4


def one_layer(family: str) -> Any:
    """The published sizes, cut to one layer; all 128 experts of mistral4 would take 6 GB, those of qwen3_vl_moe 1.2."""
    config = SIZES["published"][family]()
    changes: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "nemotron_nas":  # a layer without attention and with a narrower feed-forward, then attention alone
        first, *_, last = config.block_configs
        first = dataclasses.replace(first, ffn=dataclasses.replace(first.ffn, ffn_mult=0.5))
        changes = {"num_hidden_layers": 2, "block_configs": (first, last)}
    if family == "cohere2":  # one layer of each kind
        changes = {"num_hidden_layers": 2, "sliding_window_pattern": 2}
    if family == "glm4_moe_lite":  # without experts nothing would show what it is
        changes = {"first_k_dense_replace": 0}
    if family == "olmo3":
        changes = {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention")}
    if tower := getattr(config, "vision", None):
        deepstack = {} if family == "qwen2_vl" else {"deepstack_visual_indexes": (0,)}
        changes["vision"] = dataclasses.replace(tower, depth=1, **deepstack)
    return dataclasses.replace(config, **changes)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of a family, removed behind its tests."""
    made = tmp_path_factory.mktemp("published") / "checkpoint"
    synthesise(request.param, made, sizes="published", config=one_layer(request.param))
    yield made
    shutil.rmtree(made)


def test_it_is_loaded_and_runs(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    family, config = checkpoint.family, one_layer(checkpoint.family)
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


def test_transformers_sees_what_we_see(folder: Path) -> None:
    pytest.importorskip("torch", reason=PARITY)
    pytest.importorskip("transformers", reason=PARITY)
    if getattr(open_checkpoint(folder).model_config, "vision", None) is None:
        pytest.skip("has no tower here")
    agree(folder, with_transformers(folder), ("text", "image"), WIDE, dtype="float32", steps=1)


def test_mlx_vlm_sees_what_we_see(folder: Path) -> None:
    pytest.importorskip("mlx_vlm", reason=MLX_VLM)
    if getattr(open_checkpoint(folder).model_config, "vision", None) is None:
        pytest.skip("has no tower here")
    agree(folder, with_mlx_vlm(folder), ("text", "image"), WIDE, dtype="float32", steps=1)


def test_mlx_lm_continues_as_we_do(folder: Path) -> None:
    pytest.importorskip("mlx_lm", reason=PARITY)
    from mlx_lm.utils import load_model as load

    other, _ = load(folder)
    other.set_dtype(mx.float32)
    ids = np.random.default_rng(3).integers(0, 256, (1, 12))
    model = load_model(open_checkpoint(folder), "float32")
    mine, theirs = logits(model, ids), np.array(other(mx.array(ids)))
    if open_checkpoint(folder).family == "minicpm3":  # tied: the scale of mlx-lm-tied-minicpm3 in tests/parity
        theirs *= model.config.dim_model_base / model.config.hidden_size
    assert np.abs(mine - theirs).max() <= WIDE * theirs.std()
