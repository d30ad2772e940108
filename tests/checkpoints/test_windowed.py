"""A checkpoint with sliding windows: written, named, loaded, and read by transformers to the same logits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from harness.checkpoints import load_model, logits, open_checkpoint, synthesise
from harness.checkpoints.description import variant
from reference_models.hf.sizes import SIZES

IDS = np.random.default_rng(3).integers(0, 256, (2, 12))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers, the second with a window of 3."""
    windows = {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}
    synthesise("qwen2_vl", tmp_path / "c", config=dataclasses.replace(SIZES["tiny"]["qwen2_vl"](), **windows))
    return tmp_path / "c"


def test_it_says_where_its_windows_are(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert variant(checkpoint) == "model_type qwen2_vl, a sliding window of 3 tokens in 1 of 2 layers"
    assert load_model(checkpoint).windows == (None, 3)


def test_transformers_reads_the_same_model(folder: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    other = transformers.Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        theirs = other.eval()(input_ids=torch.from_numpy(IDS), use_cache=False).logits.numpy()
    mine = logits(load_model(open_checkpoint(folder)), IDS)
    assert np.abs(mine - theirs).max() <= 5e-5 * theirs.std()
