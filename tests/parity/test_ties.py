"""A real tie between experts, on both sides, is shown and told; one step further apart it is a failure."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from reference_models import qwen3_vl_moe
from tests.parity import checkpoints
from tests.parity.cases import Case
from tests.parity.comparing import compare
from tests.parity.peers import MlxLm, missing, with_mlx_lm
from tests.parity.routing import TIE, UnexplainedFlip

TOKENS = tuple(range(3, 13))


def tied_case(monkeypatch: pytest.MonkeyPatch, nudge: float, first: int) -> Case:
    """Every expert has the same router row; the peer's scores prefer the last expert by ``nudge``, from token ``first``
    of the prompt on."""
    draw = checkpoints.draw

    def equal_rows(name: str, shape: tuple[int, ...], seed: int) -> mx.array:
        drawn = draw(name, shape, seed)
        return mx.broadcast_to(drawn[:1], shape) if name.endswith("mlp.gate.weight") else drawn

    note = with_mlx_lm.note_gates

    def nudged(model: Any) -> Any:
        for layer in model.layers:
            layer.mlp.gate = _nudged(layer.mlp.gate, nudge, first)
        return note(model)

    monkeypatch.setattr(checkpoints, "draw", equal_rows)
    monkeypatch.setattr(with_mlx_lm, "note_gates", nudged)
    config = qwen3_vl_moe.TINY["plain"]
    return Case("qwen3_vl_moe", "text", config, {}, TOKENS, (), chunk=3, bare=False, seed=1)


def _nudged(gate: Any, nudge: float, first: int) -> Any:
    def nudged(x: mx.array) -> mx.array:
        logits = gate(x)
        tokens = mx.arange(logits.shape[1])[:, None]
        return mx.where(tokens >= first, logits + nudge * mx.arange(logits.shape[-1]), logits - mx.arange(4) * 1e-5)

    return nudged


def peer() -> MlxLm:
    found = MlxLm()
    if missing(found):
        pytest.skip("not installed: mlx-lm")
    return found


def test_a_tie_ranked_the_other_way_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = compare(peer(), tied_case(monkeypatch, 1e-5, 4))
    assert outcome.flips and {flip.token for flip in outcome.flips} == {4}
    assert all(0 < flip.gap < TIE for flip in outcome.flips)
    assert outcome.greedy == 0, "nothing behind the flip is compared"
    assert outcome.logits == 2 * 4 * 64, "but what stands before it is, in chunks and at once"


def test_the_same_apart_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnexplainedFlip, match="token 4"):
        compare(peer(), tied_case(monkeypatch, 1e-2, 4))


def test_what_stands_before_a_flip_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tied_case(monkeypatch, 1e-5, 4)
    found = peer()
    monkeypatch.setattr(found, "open", lambda case, folder: _louder(MlxLm.open(found, case, folder)))
    with pytest.raises(AssertionError, match=r"token [0-3] is off"):
        compare(found, case)


def _louder(engine: Any) -> Any:
    prefill = engine.prefill
    engine.prefill = lambda: prefill() * 1.001
    return engine
