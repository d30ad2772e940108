"""The planted bug in models that meet it in front of attention."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from harness import cli


def test_a_mask_that_is_laid_over_scores_is_caught_by_what_it_raises(tmp_path: Path) -> None:
    """Latent attention lays it over scores of its own: the wrong one raises there, and no attention call sees it."""
    arguments = ["run", "--target", "mlx_lm:glm4_moe_lite@live-window", "--profile", "smoke", "--programs", "8"]
    assert cli.main([*arguments, "--no-strict", "--out", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "targets" / "mlx_lm-glm4_moe_lite-live-window.json").read_text())
    assert record["control"]["caught"] and record["control"]["property"] == "every_operation_completes"
    assert record["findings"] == [] and record["verdict"] in ("PASS", "VACUOUS")
    assert "control" not in record["verdict_reason"] and "planted bug was not caught" not in record["verdict_reason"]
