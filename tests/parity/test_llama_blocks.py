"""nemotron_nas block by block: a layer whose parts are both real is a Llama layer, among whatever other layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models import nemotron_nas
from tests.parity import checkpoints
from tests.parity.cases import Case
from tests.parity.comparing import TOLERANCE, Ours
from tests.parity.running import seeded_case

REASON = "not installed: torch, transformers (pip install 'mlx-kv-harness[peers]')"
CASES = 50


def _block_inputs(case: Case, model: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[np.ndarray, np.ndarray]]:
    """What goes into and comes out of every block of our model, ``[1, S, hidden]``."""
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    original = nemotron_nas.Block.__call__

    def noted(self: Any, x: mx.array, *rest: Any) -> mx.array:
        out = original(self, x, *rest)
        seen.append((np.array(x), np.array(out)))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(nemotron_nas.Block, "__call__", noted)
        Ours(case, model).run([len(case.tokens)])
    return seen


def test_every_real_block_is_a_llama_layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=REASON)
    pytest.importorskip("transformers", reason=REASON)
    from safetensors.torch import load_file

    from tests.parity.peers.with_llama import llama_layer, run_layer

    compared, beside_others, worst = 0, 0, 0.0
    for number in range(CASES):
        case = seeded_case("nemotron_nas", "text", 4, number)
        folder = tmp_path / str(number)
        checkpoints.write(case, folder)
        weights = load_file(folder / "model.safetensors")
        seen = _block_inputs(case, checkpoints.load(case, folder), monkeypatch)
        assert len(seen) == case.config.num_hidden_layers
        for index, (given, ours) in enumerate(seen):
            block = case.config.block_configs[index]
            if block.attention.n_heads_in_group is None or block.ffn.ffn_mult is None:
                beside_others += 1
                continue
            layer, rotary = llama_layer(case.config, index, weights)
            with torch.no_grad():
                theirs = run_layer(layer, rotary, torch.from_numpy(given), 0, None).numpy()
            off = float(np.abs(ours - theirs).max() / theirs.std())
            assert off <= TOLERANCE, f"block {index}: {off:.1e}; {case.text()}"
            compared, worst = compared + 1, max(worst, off)
    print(f"\n{compared} blocks, worst {worst:.1e} of their deviation; {beside_others} others beside them")
    assert compared > 20 and beside_others > 20
