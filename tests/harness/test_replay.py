"""Replay: still broken, broken elsewhere, fixed, or not to be judged."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget
from kv_harness_on_fakes import fake

import properties
from harness.execution import execute
from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.operations import Chunk, Decode, Prefill, Program, TrimFront
from harness.recording import record
from harness.replay import Outcome, replay
from harness.target import Capability
from harness.trace import Trace, TraceError

PROGRAM = Program((Prefill(6), TrimFront(2), Chunk(3)))
WIDTH = "mask_key_axis_equals_live_keys"


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
    assert first == f"FAILED  {WIDTH} is still broken" and rest == [
        *result.finding.text().splitlines(),
        "      target    fake/fake@offset-mask variant plain, rows cache, weights seed 0",
    ]
    assert result.target == fake(policy="offset").identity.full_name


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
    first, program, target = result.text(BROKEN).splitlines()
    assert first == f"FIXED   {WIDTH} holds now, and so does every other property"
    assert program == f"      program   {BROKEN.program}" and target.startswith("      target    fake/fake@live-mask")


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
    trace = Trace(BROKEN.target, PROGRAM, {"property": name, "step": 0, "message": "", "reproducible": True}, (), {})
    with pytest.raises(TraceError, match="does not have") as caught:
        replay(trace, fake(), properties.ALL)
    assert len(str(caught.value)) < 200


def test_a_property_that_cannot_be_judged_there_is_not_called_fixed() -> None:
    with pytest.raises(TraceError, match="lacks: attention calls are seen"):
        replay(BROKEN, fake(lacks=frozenset({Capability.ATTENTION})), properties.ALL)


@pytest.mark.parametrize(
    "target",
    [
        FakeTarget(quirks=frozenset({"hides a call"})),
        FakeTarget(quirks=frozenset({"hides a call after a trim"})),  # judged at the prefill, not where it broke
        FakeTarget(quirks=frozenset({"encoder call"})),
        FakeTarget(quirks=frozenset({"attention by hand"})),
        fake(mask="causal"),
    ],
)
def test_what_found_nothing_to_judge_where_it_broke_is_not_called_fixed(target: FakeTarget) -> None:
    with pytest.raises(TraceError, match=f"{WIDTH} is not broken, but it found nothing to judge where it broke"):
        replay(BROKEN, target, properties.ALL)


def test_of_a_single_token_no_mask_is_fixed_too() -> None:
    """A trace may end with one token whose mask had the wrong width; of one token the right mask may be none."""
    short = Program((Prefill(6), TrimFront(2), Decode(1)), ("pool",))
    wrong = FakeTarget(policy="offset", quirks=frozenset({"mask for one token"}))
    with pytest.raises(FindingError) as caught:
        judge_program(wrong, short, [properties.BY_ID[WIDTH]])
    trace = record(execute(wrong, short), caught.value.finding, {})
    assert replay(trace, wrong, properties.ALL).same
    assert replay(trace, fake(), properties.ALL).outcome is Outcome.FIXED
    with pytest.raises(TraceError, match="found nothing to judge where it broke"):
        replay(trace, FakeTarget(quirks=frozenset({"hides a call after a trim"})), properties.ALL)


def test_another_broken_property_is_told_before_what_found_nothing_to_judge() -> None:
    """A finding is worth more than "cannot tell"."""
    blind = FakeTarget(bugs=frozenset({"positions from live_len"}), quirks=frozenset({"hides a call"}))
    again = replay(BROKEN, blind, properties.ALL)
    assert (again.outcome, again.same) == (Outcome.FAILED, False)
    assert again.finding is not None and again.finding.property_id == "positions_are_absolute"


def test_a_finding_that_never_came_back_cannot_be_called_fixed() -> None:
    assert BROKEN.finding is not None
    flaky = replace(BROKEN, finding={**BROKEN.finding, "reproducible": False})
    with pytest.raises(TraceError, match="did not come back in a fresh model when it was recorded either"):
        replay(flaky, fake(), properties.ALL)
    again = replay(flaky, fake(policy="offset"), properties.ALL)  # if it does come back, that is a finding
    assert (again.outcome, again.same) == (Outcome.FAILED, True)


@pytest.mark.parametrize("bug", ["bias under the live policy", "noise"])
def test_a_property_of_the_whole_run_can_be_called_fixed(bug: Any) -> None:
    ids = {"noise": "same_program_same_bytes"}
    chosen = properties.BY_ID[ids.get(bug, "untrimmed_outputs_are_byte_identical")]
    with pytest.raises(FindingError) as caught:
        judge_program(fake(bug), PROGRAM, [chosen])
    trace = record(execute(fake(bug), PROGRAM), caught.value.finding, {})
    assert replay(trace, fake(bug), properties.ALL).same
    assert replay(trace, fake(), properties.ALL).outcome is Outcome.FIXED


@pytest.mark.parametrize("bug", ["nan logits after a trim", "rows change in a trim"])
def test_a_finding_of_the_newer_properties_is_replayed(bug: Any) -> None:
    trace = trace_of(fake(bug))
    assert trace.finding is not None and trace.finding["reproducible"] is True
    assert replay(trace, fake(bug), properties.ALL).same
    assert replay(trace, fake(), properties.ALL).outcome is Outcome.FIXED
