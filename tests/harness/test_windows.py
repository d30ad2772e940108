"""Layers with a sliding window: each is judged by its own, and a step in which no window hides anything proves
nothing about them."""

from __future__ import annotations

from typing import Any

import pytest
from kv_harness_fake_target import FakeSession, FakeTarget

import properties
from harness.execution import execute
from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.operations import Chunk, Decode, Operation, Owner, Prefill, Program, TrimFront
from harness.recording import record
from harness.tally import Tally

CONTENT = "mask_shows_exactly_the_visible_set"
MIXED = (None, 3)  # of layers 1 and 4
SINKS = Program((Prefill(6), TrimFront(4, 1), Chunk(2)))  # held 0 5, then 6 7


def fake(*bugs: Any, **named: Any) -> FakeTarget:
    return FakeTarget(bugs=frozenset(bugs), **({"windows": MIXED} | named))


def judge(target: FakeTarget, *operations: Operation, only: str | None = CONTENT) -> tuple[Finding | None, int]:
    """The finding, and the decisive steps of the content property."""
    tally = Tally()
    chosen = [prop for prop in properties.ALL if only in (None, prop.id)]
    try:
        judge_program(target, Program(operations), chosen, tally)
    except FindingError as error:
        return error.finding, 0
    return None, tally.properties[CONTENT].decisive_steps


@pytest.mark.parametrize(
    ("bug", "operations", "step", "message"),
    [
        (
            "window one too wide",
            (Prefill(3), Chunk(2)),
            1,
            "position 3; 2 of 10 entries are wrong (offset 3, 3 keys held, chunk of 2, window of 3)",
        ),
        (
            "window counted in slots",
            SINKS.operations,
            2,
            "layer 4: the mask shows the key at position 0 (slot 0) to the token at position 6; 1 of 8 entries",
        ),
        ("no window", (Prefill(4),), 0, "layer 4: the mask shows the key at position 0 (slot 0) to the token at "),
        (
            "no window for one token",
            (Prefill(3), Decode(1)),
            1,
            "layer 4: attention (no mask) shows the key at position 0 (slot 0) to the token at position 3",
        ),
    ],
)
def test_a_wrong_window_is_found_by_the_content_alone(
    bug: Any, operations: tuple[Operation, ...], step: int, message: str
) -> None:
    finding, _ = judge(fake(bug), *operations)
    assert finding is not None and message in finding.message
    assert (finding.property_id, finding.violation.step) == (CONTENT, step)
    anywhere, _ = judge(fake(bug), *operations, only=None)
    assert anywhere is not None and anywhere.property_id == CONTENT
    assert judge(fake(bug, windows=(None, None)), *operations)[0] is None  # no window, no bug


def test_a_window_on_the_wrong_layer_is_found() -> None:
    class Swapped(FakeTarget):
        def open(self, owners: tuple[Owner, ...]) -> FakeSession:
            return FakeSession(fake(windows=(3, None)), owners)

    finding, _ = judge(Swapped(windows=MIXED), Prefill(5))
    assert finding is not None and "layer 1: the mask hides the key at position 0" in finding.message


@pytest.mark.parametrize("windows", [MIXED, (3, 3), (1, 100)])
@pytest.mark.parametrize("mask", ["bool", "additive"])
def test_a_right_window_is_not_reported(windows: tuple[int | None, ...], mask: Any) -> None:
    program = (*SINKS.operations, Decode(3), TrimFront(2, 2), Chunk(4))
    finding, decisive = judge(fake(windows=windows, mask=mask), *program, only=None)
    assert finding is None and decisive > 0


@pytest.mark.parametrize(
    ("operations", "decisive"),
    [
        ((Prefill(3), TrimFront(2), Chunk(2)), 0),  # 2 3 4: two behind is within three
        ((Prefill(2), Decode(1)), 0),
        ((Prefill(4),), 1),
        ((Prefill(3), Decode(1)), 1),
        (SINKS.operations, 2),
    ],
)
def test_a_step_decides_only_where_a_window_hides_a_key(operations: tuple[Operation, ...], decisive: int) -> None:
    assert judge(fake(), *operations) == (None, decisive)


def test_a_trace_names_the_window_of_a_layer() -> None:
    steps = record(execute(fake(), Program((Prefill(4),))), None, {}).steps
    assert [call.get("window") for call in steps[0]["forwards"][0]["attention"]] == [None, 3]
    assert "window" not in steps[0]["forwards"][0]["attention"][0]
