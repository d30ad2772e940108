"""Layers that guess further tokens stand in some checkpoints behind the last layer of the model."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from harness.checkpoints import CheckpointError, open_checkpoint
from tests.checkpoints.conftest import Synth
from tests.checkpoints.test_loading import rewritten, run


def test_layers_that_guess_further_tokens_are_left_out(synth: Synth, tmp_path: Path) -> None:
    """Published beside GLM-4.7-Flash, as a layer behind the last; without the config's word for it, unexpected."""
    family = "glm4_moe_lite"
    ahead = {"model.layers.2.eh_proj.weight": mx.zeros((2, 4)), "model.layers.2.mlp.gate_proj.weight": mx.zeros((2, 2))}
    folder = rewritten(synth(family), tmp_path / "c", lambda weights: weights | ahead)
    with pytest.raises(CheckpointError, match=r"unexpected key 'model\.layers\.2\."):
        open_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    for count, fits in ((1, True), (2, True), (0, False), ("1", False), (True, False)):
        (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
        if not fits:
            with pytest.raises(CheckpointError, match="unexpected key"):
                open_checkpoint(folder)
            continue
        checkpoint = open_checkpoint(folder)
        assert any("2 weights of layers that guess further tokens are not used" in note for note in checkpoint.notes)
        np.testing.assert_array_equal(run(folder), run(synth(family)))
