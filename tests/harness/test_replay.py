"""Replay: still broken, broken elsewhere, fixed, or not to be judged."""

from __future__ import annotations

from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness.execution import execute
from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.operations import Chunk, Prefill, Program, TrimFront
from harness.recording import record
from harness.replay import Outcome, replay
from harness.target import Capability
from harness.trace import Trace, TraceError

PROGRAM = Program((Prefill(6), TrimFront(2), Chunk(3)))
WIDTH = "mask_key_axis_equals_live_keys"


def fake(*bugs: Any, **named: Any) -> FakeTarget:
    return FakeTarget(bugs=frozenset(bugs), **named)


def trace_of(target: FakeTarget) -> Trace:
    """The trace of the finding that PROGRAM makes on a target."""
    finding: Finding | None = None
    try:
        judge_program(target, PROGRAM, properties.ALL)
    except FindingError as error:
        finding = error.finding
    return record(execute(target, PROGRAM), finding, {})


BROKEN = trace_of(fake(policy="offset"))


def test_still_broken() -> None:
    result = replay(BROKEN, fake(policy="offset"), properties.ALL)
    assert (result.outcome, result.same) == (Outcome.FAILED, True)
    assert result.finding is not None and result.finding.property_id == WIDTH
    assert BROKEN.finding is not None and result.finding.message == BROKEN.finding["message"]
    first, *rest = result.text(BROKEN).splitlines()
    assert first == f"FAILED  {WIDTH} is still broken" and rest == result.finding.text().splitlines()


def test_the_recorded_property_is_asked_first() -> None:
    """On a target with two bugs the replay answers for the one that was recorded."""
    two = fake("positions from live_len", "mask leaks")
    trace = trace_of(fake("positions from live_len"))
    result = replay(trace, two, properties.ALL)
    assert result.same and result.finding is not None and result.finding.property_id == "positions_are_absolute"


def test_another_property_is_broken_now() -> None:
    result = replay(BROKEN, fake("mask leaks"), properties.ALL)
    assert (result.outcome, result.same) == (Outcome.FAILED, False)
    assert result.finding is not None and result.finding.property_id == "mask_shows_exactly_the_visible_set"
    assert result.text(BROKEN).splitlines()[0] == f"FAILED  {WIDTH} was recorded, now another is broken"


def test_fixed() -> None:
    result = replay(BROKEN, fake(), properties.ALL)
    assert (result.outcome, result.finding, result.same) == (Outcome.FIXED, None, False)
    assert result.text(BROKEN) == f"FIXED   {WIDTH} holds now, and so does every other property"


def test_a_trace_without_a_finding() -> None:
    trace = trace_of(fake())
    assert trace.finding is None
    clean = replay(trace, fake(), properties.ALL)
    assert clean.outcome is Outcome.FIXED and "records no finding" in clean.text(trace)
    broken = replay(trace, fake("mask leaks"), properties.ALL)
    assert broken.outcome is Outcome.FAILED and not broken.same
    assert broken.text(trace).startswith("FAILED  nothing was recorded")


@pytest.mark.parametrize("name", ["no_such_property", "", "x" * 10_000])
def test_an_unknown_property_is_refused(name: str) -> None:
    trace = Trace(BROKEN.target, PROGRAM, {"property": name, "step": 0, "message": ""}, (), {})
    with pytest.raises(TraceError, match="does not have") as caught:
        replay(trace, fake(), properties.ALL)
    assert len(str(caught.value)) < 200


def test_a_property_that_cannot_be_judged_there_is_not_called_fixed() -> None:
    with pytest.raises(TraceError, match="lacks: attention calls are seen"):
        replay(BROKEN, fake(lacks=frozenset({Capability.ATTENTION})), properties.ALL)
