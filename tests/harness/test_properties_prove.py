"""What counts as decisive: a property says how much it proved, and nothing where it proved nothing."""

from __future__ import annotations

import pytest
from kv_harness_fake_target import FakeTarget
from kv_harness_on_fakes import (
    CACHE_FREE,
    COMPLETES,
    CONTENT,
    FINITE,
    LENGTHS,
    POSITIONS,
    REMOVED,
    RICH,
    ROWS,
    SAME,
    UNTOUCHED,
    UNTRIMMED,
    WIDTH,
    WITNESS,
    fake,
    judge,
    quirky,
)

from harness.operations import Chunk, Decode, EnforceMaxKvSize, Prefill, Program, Rollback, TrimFront

VACUOUS = [
    (WIDTH, fake(), UNTOUCHED),  # nothing trimmed: both policies build the same mask
    (WIDTH, fake(), Program((Prefill(6), TrimFront(2), Decode(4)))),  # no chunk after the trim
    (WIDTH, fake(), Program((Prefill(6), Rollback(2), Chunk(3)))),  # a rollback moves the offset as well
    (WIDTH, fake(mask="causal"), RICH),
    (WIDTH, fake(mask="none"), RICH),
    (WIDTH, quirky("attention by hand"), RICH),
    (WIDTH, quirky("attention by hand", policy="offset"), RICH),  # there, the crash says it
    (WIDTH, quirky("quantised attention by hand", policy="offset"), RICH),
    (WIDTH, quirky("hides a call"), RICH),
    (WIDTH, quirky("hides a call after a trim"), RICH),
    (WIDTH, quirky("encoder call"), RICH),
    (CONTENT, fake(mask="causal"), RICH),
    (CONTENT, fake(), Program((Prefill(1), Decode(3)))),
    (CONTENT, fake(mask="none"), Program((Prefill(1), Decode(3)))),
    (CONTENT, quirky("mask for one token", mask="additive"), Program((Prefill(1), Decode(3)))),
    (CONTENT, quirky("scores for one token", mask="additive"), Program((Prefill(1), Decode(3)))),
    (CONTENT, quirky("queries of the last token only", mask="none"), RICH),
    (CONTENT, quirky("hides a call"), RICH),
    (CONTENT, quirky("encoder call"), RICH),
    (LENGTHS, fake(), UNTOUCHED),
    (LENGTHS, fake(), Program((Prefill(3), TrimFront(2), Chunk(2)), ("model",))),
    (POSITIONS, fake(), UNTOUCHED),
    (POSITIONS, fake(), Program((Prefill(6), Rollback(3), Chunk(2)))),
    (POSITIONS, quirky("hides positions after a trim"), Program(RICH.operations[:5], RICH.owners)),
    (POSITIONS, quirky("a table instead of positions"), RICH),
    (POSITIONS, quirky("a table beside the positions"), RICH),
    (POSITIONS, quirky("a single number as position"), RICH),
    (REMOVED, fake(), UNTOUCHED),
    (REMOVED, fake(), Program((Prefill(4), EnforceMaxKvSize(4)), ("model",))),  # not due
    (REMOVED, fake(), Program((Prefill(4), TrimFront(0), Rollback(0), EnforceMaxKvSize(4)))),
    (COMPLETES, fake(), Program(())),
    (FINITE, fake(), Program((Prefill(6), Prefill(4, 1)), ("pool", "pool"))),
    (FINITE, fake(), Program((Prefill(6), TrimFront(10_000), Chunk(3)))),
    (FINITE, fake(fails_at=2), UNTOUCHED),
    (ROWS, fake(), UNTOUCHED),
    (ROWS, fake(), Program((Prefill(3), TrimFront(10_000), Chunk(2)))),  # nothing stayed
    (ROWS, fake(), Program((Prefill(3), TrimFront(1)), ("model",))),
    (ROWS, fake(), Program((Prefill(3), TrimFront(0), Rollback(0), EnforceMaxKvSize(3)))),
    (ROWS, fake("neighbour trimmed too"), Program((Prefill(3), Prefill(1, 1), TrimFront(3)), ("pool", "pool"))),
    (SAME, fake(), Program((TrimFront(1),))),
    (SAME, fake(fails_at=1), UNTOUCHED),  # both raise: no bytes to compare
    (UNTRIMMED, fake(mask="causal"), RICH),
    (UNTRIMMED, fake(mask="none"), RICH),
    (UNTRIMMED, quirky("no mask under the offset policy"), RICH),
    (UNTRIMMED, quirky("no mask under the offset policy", policy="offset"), RICH),
    (UNTRIMMED, quirky("scores for one token", mask="additive"), Program((Prefill(1), Decode(3)))),
    (UNTRIMMED, fake(), Program((Prefill(1), Decode(3)))),
    (UNTRIMMED, fake(), Program((TrimFront(1), Rollback(1)))),
    *(
        (judge_of_outputs, target, program)
        for judge_of_outputs in (WITNESS, CACHE_FREE)
        for target, program in (
            (fake(), Program((Prefill(6), Decode(3), Prefill(2, 1)), ("pool", "pool"))),
            (fake(), Program((Prefill(6), TrimFront(2), Rollback(2)))),  # nothing was computed behind them
            (fake(), Program((Prefill(6), TrimFront(2), Prefill(2, 1)), ("pool", "pool"))),
            (fake(), Program((TrimFront(1),))),
            (fake(fails_at=2), UNTOUCHED),
            (fake("logits of the last token only"), Program((Prefill(6), Chunk(2), TrimFront(1), Chunk(2)))),
            (quirky("experts nearly tie"), RICH),
            (quirky("rows nearly round to others"), RICH),
        )
    ),
]


@pytest.mark.parametrize(("property_id", "target", "program"), VACUOUS)
def test_what_proves_nothing_is_not_decisive(property_id: str, target: FakeTarget, program: Program) -> None:
    outcome = judge(target, program, property_id)
    assert outcome.finding is None and outcome.decisive(property_id) == 0


def test_one_decisive_operation_makes_the_difference() -> None:
    """The other side of the test above: the smallest decisive program of each property."""
    bare = [
        (WIDTH, Program((Prefill(6), TrimFront(2), Chunk(3)))),
        (CONTENT, Program((Prefill(2),))),
        (LENGTHS, Program((Prefill(6), Rollback(1)))),
        (POSITIONS, Program((Prefill(6), TrimFront(1), Decode(1)))),
        (REMOVED, Program((Prefill(3), Rollback(1)))),
        (REMOVED, Program((Prefill(3), TrimFront(1)), ("model",))),
        (REMOVED, Program((Prefill(3), EnforceMaxKvSize(2)), ("model",))),
        (FINITE, Program((Prefill(1), Decode(1)))),
        (ROWS, Program((Prefill(2), TrimFront(1)))),
        (ROWS, Program((Prefill(2), Rollback(1)))),
        (COMPLETES, Program((TrimFront(1),))),
        (SAME, Program((Prefill(1),))),
        (UNTRIMMED, Program((Prefill(2),))),
        *(
            (judge_of_outputs, Program((Prefill(6), *operations)))
            for judge_of_outputs in (WITNESS, CACHE_FREE)
            for operations in ((Chunk(2),), (TrimFront(1), Decode(1)), (Rollback(1), Decode(1)))
        ),
    ]
    one = Program((Prefill(1),))
    with_mask, last = quirky("mask for one token"), quirky("queries of the last token only")
    others = [(CONTENT, with_mask, one), (UNTRIMMED, with_mask, one), (CONTENT, last, Program((Prefill(2),)))]
    for property_id, target, program in [*((name, fake(), program) for name, program in bare), *others]:
        assert judge(target, program, property_id).decisive(property_id) >= 1
        shorter = Program(program.operations[:-1], program.owners)
        assert judge(target, shorter, property_id).decisive(property_id) == 0


def test_what_cannot_decide_is_judged_all_the_same_and_what_cannot_be_judged_is_not() -> None:
    """``steps`` tells the two apart: a causal mask is compared, a table of angles is left alone."""
    forwards = 10
    by_hand = quirky("attention by hand", mask="additive")
    for property_id, target, looked in (
        (CONTENT, fake(mask="causal"), forwards),
        (CONTENT, by_hand, forwards),
        (CONTENT, quirky("hides a call"), 0),
        (WIDTH, fake(), 8),  # a decode has no mask
        (WIDTH, by_hand, 0),
        (POSITIONS, quirky("a table beside the positions"), forwards),
        (POSITIONS, quirky("a table instead of positions"), 0),
        (POSITIONS, quirky("a single number as position"), 0),
        (FINITE, fake(), forwards),
        (WITNESS, fake(), forwards),
        (CACHE_FREE, fake(), forwards),
        (WITNESS, quirky("rows nearly round to others"), forwards),  # with a wide tolerance
        (WITNESS, quirky("experts nearly tie"), 0),
        (WITNESS, fake(fails_at=4), 3),
    ):
        assert judge(target, RICH, property_id).looked(property_id) == looked
