"""The property that computes attention again: what it finds, and what it leaves alone."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from kv_harness_on_fakes import ATTENDED, RICH, UNTOUCHED, fake, judge, quirky

from harness.execution import execute
from harness.judging import Evidence
from harness.operations import Batch, BatchForward, Prefill, Program
from harness.target import AttentionValues, Capability
from properties.attention import ALLOWED, AttentionEqualsFloat64, attend

GIVEN = np.random.default_rng(0)


def values(heads: int = 4, kv_heads: int = 2, queries: int = 3, keys: int = 5) -> AttentionValues:
    q, k, v = (
        GIVEN.normal(size=(2, count, length, width))
        for count, length, width in ((heads, queries, 8), (kv_heads, keys, 8), (kv_heads, keys, 6))
    )
    return AttentionValues(q, k, v, np.zeros((2, heads, queries, 6)), 0.3)


def test_every_key_head_serves_its_group_and_a_mask_hides() -> None:
    given = values()
    added = np.where(np.tri(3, 5, 2, dtype=bool), 0.0, -np.inf)[None, None]
    out = attend(AttentionValues(given.queries, given.keys, given.values, given.out, given.scale, added))
    for row, head, query in np.ndindex(2, 4, 3):
        shown = 3 + query
        weights = np.exp(given.scale * given.keys[row, head // 2, :shown] @ given.queries[row, head, query])
        assert out[row, head, query] == pytest.approx(weights @ given.values[row, head // 2, :shown] / weights.sum())


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    given, sinks = values(), np.array([0.5, -1.0, 30.0, 0.0])
    out = attend(dataclasses.replace(given, sinks=sinks))
    for row, head, query in np.ndindex(2, 4, 3):
        weights = np.exp(given.scale * given.keys[row, head // 2] @ given.queries[row, head, query])
        share = weights.sum() + np.exp(sinks[head])
        assert out[row, head, query] == pytest.approx(weights @ given.values[row, head // 2] / share)


def test_a_query_that_sees_nothing_is_no_number() -> None:
    given = values()
    hidden = AttentionValues(given.queries, given.keys, given.values, given.out, 1.0, np.full((1, 1, 3, 5), -np.inf))
    assert np.isnan(attend(hidden)).all()
    assert np.isnan(attend(values(keys=0))).all()  # an engine that lost all keys: mlx-lm 0.31.3 did


@pytest.mark.parametrize("program", [RICH, UNTOUCHED])
def test_a_number_that_is_off_is_found_with_its_place(program: Program) -> None:
    finding = judge(fake("attention a little off"), program, ATTENDED).finding
    assert finding is not None and finding.violation.step == 0
    assert "layer 1: head 3 gives" in finding.message and "6 queries, 6 keys" in finding.message


def test_rows_of_a_batch_are_judged_too() -> None:
    program = Program((Prefill(3), Prefill(1, 1), Batch((0, 1)), BatchForward((2, 1))), ("pool", "pool"))
    alone = judge(fake(), Program(program.operations[:2], program.owners), ATTENDED).decisive(ATTENDED)
    assert judge(fake(), program, ATTENDED).decisive(ATTENDED) == alone + 4  # two rows in two layers
    assert judge(fake("attention a little off"), program, ATTENDED).finding is not None


def test_without_a_second_key_nothing_is_decided_and_without_values_nothing_judged() -> None:
    one = judge(fake(), Program((Prefill(1),)), ATTENDED)
    assert (one.decisive(ATTENDED), one.looked(ATTENDED)) == (0, 2)
    for target in (fake(lacks=frozenset({Capability.ATTENTION_VALUES})), quirky("hides a call")):
        assert judge(target, RICH, ATTENDED).looked(ATTENDED) == 0


def test_what_is_allowed_is_far_from_what_a_bug_does() -> None:
    assert ALLOWED < 1e-4


def test_no_other_shape_passes_by_broadcasting() -> None:
    evidence = Evidence(execute(fake(), UNTOUCHED))
    call = evidence.repeat.steps[0].forwards[0].seen.attention[0]
    assert call.values is not None
    object.__setattr__(call.values, "out", np.array(0.0))
    violation = AttentionEqualsFloat64().judge_run(evidence).violation
    assert violation is not None and "attention gives [], what it was given makes [" in violation.message


@pytest.mark.parametrize("number", [np.nan, 0.5])
def test_what_is_no_number_and_values_that_are_all_alike_decide_nothing(number: float) -> None:
    """A mean of one and the same is that, whoever is seen."""
    evidence = Evidence(execute(fake(), UNTOUCHED))
    assert AttentionEqualsFloat64().judge_run(evidence).decisive > 0
    calls = [c for step in evidence.repeat.steps for f in step.forwards for c in f.seen.attention]
    for call in calls:
        assert call.values is not None
        for side in (call.values.values, call.values.out):
            side[...] = number
    judgement = AttentionEqualsFloat64().judge_run(evidence)
    assert judgement.violation is None and judgement.decisive == 0 and judgement.steps == len(calls)
