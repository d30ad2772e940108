"""Attention: what comes out of a call is what its inputs say."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from harness.findings import Violation
from harness.judging import Evidence, Judgement, Property, attention_calls
from harness.target import AttentionValues, Capability

ALLOWED = 2e-5
"""How far float32 attention may be from float64, relative to the largest value that it weighs."""


class AttentionEqualsFloat64(Property):
    id = "attention_equals_float64"
    sentence = (
        "What attention gives is the softmax of its own queries, keys and mask over its own values, computed again in "
        "float64."
    )
    decisive_when = "a call over two keys or more, whose values are not all alike; all of it in numbers"
    needs: ClassVar = frozenset({Capability.ATTENTION, Capability.ATTENTION_VALUES})
    runs_again = True

    def judge_run(self, evidence: Evidence) -> Judgement:
        looked = decisive = 0
        worst = 0.0
        for step in evidence.repeat.steps:
            for forward in step.forwards:
                for layer, call in attention_calls(evidence.repeat, forward):
                    if call.values is None:
                        continue
                    expected, given = attend(call.values), call.values.values
                    looked += 1
                    if call.values.out.shape != expected.shape:
                        message = (
                            f"{step.operation.text()}: layer {layer}: attention gives {list(call.values.out.shape)}, "
                            f"what it was given makes {list(expected.shape)}"
                        )
                        return Judgement(looked, decisive + 1, worst, Violation(step.index, message))
                    unit = float(np.abs(given).max(initial=0.0)) or 1.0
                    gaps = np.abs(call.values.out - expected) / unit
                    numbers = np.isfinite(expected)
                    gaps[~numbers] = 0.0  # it sees nothing: every_forward_gives_finite_logits
                    decisive += bool(numbers.all()) and bool((given != given[..., :1, :]).any())
                    far = float(np.nanmax(gaps, initial=0.0))
                    worst = max(worst, far)
                    if not (gaps <= ALLOWED).all():
                        at = tuple(int(i) for i in np.argwhere(~(gaps <= ALLOWED))[0])
                        positions = list(forward.append.positions)[-expected.shape[2] :]
                        where = positions[at[2]] if at[2] < len(positions) else f"none (query {at[2]})"
                        message = (
                            f"{step.operation.text()}: layer {layer}: head {at[1]} gives "
                            f"{call.values.out[at]:.9g} for the token at position {where}, "
                            f"float64 {expected[at]:.9g} (largest difference {far:.3g} of the largest value, "
                            f"{ALLOWED:g} allowed; {call.query_len} queries, {call.key_len} keys)"
                        )
                        return Judgement(looked, decisive, worst, Violation(step.index, message))
        return Judgement(looked, decisive, worst if looked else None)


def attend(given: AttentionValues) -> np.ndarray[Any, Any]:
    """softmax(scale * q k^T + added) v in float64, [B, H, l, Dv]; every KV head serves as many query heads (Ainslie et
    al. 2023, arXiv 2305.13245). A sink is one more score, whose share nobody gets. NaN where a query sees nothing."""
    repeats = given.queries.shape[1] // given.keys.shape[1]
    keys, values = (np.repeat(side, repeats, axis=1) for side in (given.keys, given.values))
    scores = given.scale * (given.queries @ keys.swapaxes(-1, -2))
    if given.added is not None:
        scores = scores + given.added
    with np.errstate(invalid="ignore"):
        top = scores.max(axis=-1, keepdims=True, initial=-np.inf)  # an engine may have lost all of its keys
        if given.sinks is not None:
            top = np.maximum(top, given.sinks[:, None, None])
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        if given.sinks is not None:
            total = total + np.exp(given.sinks[:, None, None] - top)
        out: np.ndarray[Any, Any] = np.where(total > 0, (weights / total) @ values, np.nan)
    return out
