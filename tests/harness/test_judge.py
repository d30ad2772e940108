"""Every property on a fake target: a bug that it must catch, a harmless variation, and when it must prove nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness.execution import execute
from harness.findings import Finding, FindingError
from harness.judge import Judge, judge_program
from harness.operations import (
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
)
from harness.tally import Tally
from harness.target import Capability

WIDTH = "mask_key_axis_equals_live_keys"
LENGTHS = "keys_equal_ledger_live_length"
CONTENT = "mask_shows_exactly_the_visible_set"
POSITIONS = "positions_are_absolute"
REMOVED = "trim_reports_what_it_removed"
COMPLETES = "every_operation_completes"
SAME = "same_program_same_bytes"
UNTRIMMED = "untrimmed_outputs_are_byte_identical"
FINITE = "every_forward_gives_finite_logits"
ROWS = "cached_rows_stay_what_they_were"

#: Reaches everything: a chunk after a trim, sinks, a trim to zero, a rollback, a second and a model-owned sequence.
RICH = Program(
    (
        Prefill(6),
        Chunk(3),
        Prefill(4, 1),
        TrimFront(4, 1),
        Chunk(3),
        Decode(2),
        Rollback(2),
        Chunk(2),
        EnforceMaxKvSize(4, "sinks"),
        Chunk(2),
        TrimFront(3, 0, 1),
        Chunk(2, 1),
        TrimFront(10_000),
        Chunk(3),
    ),
    ("pool", "model"),
)
#: What RICH has not: a restored snapshot, a fork that goes on, a file, a reset.
COPIES = Program(
    (Prefill(4), Snapshot(0), Chunk(2), Restore(0), Fork(1), Chunk(2), Chunk(2, 1), SaveLoad(), Reset(), Prefill(2)),
    ("pool", "pool"),
)
UNTOUCHED = Program((Prefill(6), Chunk(3), Decode(2)))


@dataclass
class Outcome:
    tally: Tally = field(default_factory=Tally)
    finding: Finding | None = None

    def decisive(self, property_id: str) -> int:
        return self.tally.properties[property_id].decisive_steps if property_id in self.tally.properties else 0

    def looked(self, property_id: str) -> int:
        return self.tally.properties[property_id].steps if property_id in self.tally.properties else 0


def judge(target: FakeTarget, program: Program, *ids: str) -> Outcome:
    """Judge with the named properties (all, if none is named)."""
    outcome = Outcome()
    chosen = [prop for prop in properties.ALL if not ids or prop.id in ids]
    try:
        judge_program(target, program, chosen, outcome.tally)
    except FindingError as error:
        outcome.finding = error.finding
    return outcome


def fake(*bugs: Any, **named: Any) -> FakeTarget:
    return FakeTarget(bugs=frozenset(bugs), **named)


def quirky(*quirks: Any, **named: Any) -> FakeTarget:
    return FakeTarget(quirks=frozenset(quirks), **named)


CAUGHT = [
    (
        WIDTH,
        fake(policy="offset"),
        4,
        "the mask has 12 keys, attention received 8 (offset 9, live_start 4, chunk of 3)",
    ),
    (CONTENT, fake("mask leaks"), 0, "shows the key at position 1 (slot 1) to the token at position 0"),
    (CONTENT, fake("mask hides itself"), 0, "hides the key at position 0"),
    (CONTENT, fake("mask one row short"), 0, "layer 1: 6 queries and 5 mask rows for a chunk of 6"),
    (CONTENT, fake("a query too many"), 0, "layer 1: 7 queries and 6 mask rows for a chunk of 6"),
    (CONTENT, fake("mask leaks", mask="additive"), 0, "layer 1: the mask shows the key at position 1"),
    (
        CONTENT,
        fake(mask="none"),
        0,
        "layer 1: attention (no mask) shows the key at position 1 (slot 1) to the token at position 0; 15 of 36 ",
    ),
    (CONTENT, fake("mask hides itself", quirks=frozenset({"attention by hand"})), 0, "the mask hides the key"),
    (
        CONTENT,
        fake("mask hides itself", quirks=frozenset({"queries of the last token only"})),
        0,
        "hides the key at position 5 (slot 5) to the token at position 5; 1 of 6 entries are wrong",
    ),
    (LENGTHS, fake("keys one short after rollback", mask="causal"), 7, "layer 1: attention received 9 keys"),
    (LENGTHS, fake("values one short after a trim"), 4, "attention received 7 values"),
    (LENGTHS, fake("cache says offset for live_len"), 3, "the ledger says offset 9, live_start 4, live_len 5"),
    (LENGTHS, fake("neighbour trimmed too"), 3, "the cache of sequence 1 says offset 4, live_start 1, live_len 3"),
    (
        POSITIONS,
        fake("positions from live_len"),
        4,
        "rope call 0: token 0 of the chunk stands at position 9, it was given 5",
    ),
    (
        POSITIONS,
        fake("positions from live_len", quirks=frozenset({"a table beside the positions"})),
        4,
        "rope call 1: token 0 of the chunk stands at position 9, it was given 5",
    ),
    (REMOVED, fake("reports zero removed"), 3, "TrimFront(4, keep=1): layer 1: the cache reports 0 removed"),
    (REMOVED, fake("visits one cache"), 3, "1 caches were visited, the sequence has 2"),
    (REMOVED, fake("trims what the model owns"), 10, "the sequence is model-owned, yet 2 caches were trimmed"),
    (COMPLETES, fake("raises after a trim to zero"), 13, "Chunk(3) raised RuntimeError: no buffer to append to ("),
    (COMPLETES, fake(fails_at=2), 1, "Chunk(3) raised RuntimeError: told to fail (offset 6"),
    (
        FINITE,
        fake("nan logits after a trim"),
        4,
        "Chunk(3): the logits of the token at position 11 are not finite: entry 3 is nan (5 keys held)",
    ),
    (
        FINITE,
        fake("inf logits after a trim"),
        4,
        "Chunk(3): the logits of the token at position 9 are not finite: entry 2 is -inf (5 keys held)",
    ),
    (
        FINITE,
        fake("logits of the last token only"),
        0,
        "Prefill(6): the logits have the shape [1, 11], expected [6, 11]",
    ),
    (
        ROWS,
        fake("rows change in a trim"),
        3,
        "the key row of position 0 (sequence 0, slot 0 before TrimFront(4, keep=1), slot 0 after) changed by 1",
    ),
    (
        ROWS,
        fake("rows of the neighbour change in a trim"),
        3,
        "the key row of position 0 (sequence 1, slot 0 before TrimFront(4, keep=1) on sequence 0, slot 0 after)",
    ),
    (SAME, fake("noise"), 0, "under the first run"),
    (SAME, fake("noise in two logits"), 0, "the logits of the token at position 5 differ at entry 0"),
    (UNTRIMMED, fake("bias under the live policy"), 0, "largest difference 0.5"),
    (UNTRIMMED, fake("nan logits under the live policy"), 0, "nan under the live policy"),
]


@pytest.mark.parametrize(("property_id", "target", "step", "message"), CAUGHT)
def test_a_bug_that_the_property_must_catch(property_id: str, target: FakeTarget, step: int, message: str) -> None:
    finding = judge(target, RICH, property_id).finding
    assert finding is not None
    assert (finding.property_id, finding.violation.step) == (property_id, step)
    assert message in finding.message and "\n" not in finding.message
    assert finding.target == f"fake/fake@{target.policy}-mask"
    whole = property_id in (SAME, UNTRIMMED)
    assert finding.program.operations == (RICH.operations if whole else RICH.operations[: step + 1])
    first = judge(target, RICH).finding  # among all, its cause may be found under another name, but not later
    assert first is not None and first.violation.step is not None and first.violation.step <= step


@pytest.mark.parametrize(
    "target",
    [
        fake(),
        fake(mask="additive"),
        fake(mask="causal"),
        fake(attention_layers=(0,)),
        quirky("batch and head axes"),
        quirky("one row for all queries when all are visible", "mask for one token"),
        quirky("mask for one token"),
        quirky("hides a call"),
        quirky("hides a call after a trim"),
        quirky("encoder call"),
        quirky("hides positions after a trim"),
        *(quirky("queries of the last token only", mask=mask) for mask in ("bool", "additive", "causal", "none")),
        quirky("attention by hand"),
        quirky("quantised attention by hand", mask="additive"),
        quirky("scores for one token", mask="additive"),
        quirky("no mask under the offset policy"),
        quirky("a table instead of positions"),
        quirky("a table beside the positions"),
        quirky("a single number as position"),
        fake(variant="other"),
        fake(lacks=frozenset(Capability)),
    ],
)
def test_a_harmless_variation_is_not_reported(target: FakeTarget) -> None:
    assert judge(target, RICH).finding is None


def test_on_a_right_target_every_property_is_decisive() -> None:
    outcomes = [judge(fake(), program) for program in (RICH, COPIES)]
    assert [outcome.finding for outcome in outcomes] == [None, None]
    assert {p.id for p in properties.ALL if not any(outcome.decisive(p.id) for outcome in outcomes)} == set()


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
    ):
        assert judge(target, RICH, property_id).looked(property_id) == looked


def test_rows_that_do_not_match_the_positions_are_left_to_the_lengths() -> None:
    outcome = judge(fake("neighbour trimmed too"), RICH, ROWS)
    assert outcome.finding is None and outcome.decisive(ROWS) > 0


def test_a_missing_capability_keeps_a_property_from_judging() -> None:
    for prop in properties.ALL:
        for capability in prop.needs:
            outcome = judge(fake(lacks=frozenset({capability})), RICH, prop.id)
            assert outcome.looked(prop.id) == 0 and outcome.finding is None


def test_a_target_that_does_not_repeat_itself_makes_the_ab_comparison_inconclusive() -> None:
    outcome = judge(fake("noise", "bias under the live policy"), UNTOUCHED, UNTRIMMED)
    assert outcome.finding is None
    tally = outcome.tally.properties[UNTRIMMED]
    assert (tally.inconclusive, tally.decisive_steps) == (1, 0)


def test_blind_forwards_are_counted() -> None:
    forwards = judge(fake(), RICH).tally.coverage.forwards
    assert forwards == 10
    assert judge(fake(), RICH).tally.coverage.blind_forwards == 0
    assert judge(quirky("hides a call"), RICH).tally.coverage.blind_forwards == forwards
    assert judge(quirky("encoder call"), RICH).tally.coverage.blind_forwards == forwards
    after = sum(len(step.forwards) for step in execute(fake(), RICH).steps if step.before.trimmed)
    assert 0 < after < forwards
    for quirk in ("hides a call after a trim", "hides positions after a trim"):
        assert judge(quirky(quirk), RICH).tally.coverage.blind_forwards == after
    assert judge(fake(fails_at=1), RICH).tally.coverage.blind_forwards == 0  # it raised: that says enough
    assert judge(quirky("a table instead of positions"), RICH).tally.coverage.blind_forwards == 0


def test_a_muted_property_is_counted_and_does_not_stop_the_program() -> None:
    tally = Tally()
    target = fake("reports zero removed", "positions from live_len")
    muted = Judge(target, RICH.owners, properties.ALL, tally, {REMOVED, POSITIONS})
    for operation in RICH.operations:
        muted.apply(operation)
    muted.end()
    muted.end()  # twice does nothing
    assert tally.coverage.programs == 1 and len(muted.run.steps) == len(RICH.operations)
    assert tally.properties[REMOVED].violations >= 2 and tally.properties[POSITIONS].violations >= 2


def test_after_a_finding_the_program_has_ended() -> None:
    tally = Tally()
    subject = Judge(fake("mask leaks"), ("pool",), properties.ALL, tally)
    with pytest.raises(FindingError) as caught:
        subject.apply(Prefill(4))
    assert subject.stopped and tally.coverage.programs == 1
    subject.end()
    assert tally.coverage.programs == 1 and tally.properties[CONTENT].violations == 1
    text = caught.value.finding.text("kv-harness replay x.json").splitlines()
    assert text[0] == f"FAIL  {CONTENT}   fake/fake@live-mask"
    assert text[2:] == ["      program   Prefill(4)", "      replay    kv-harness replay x.json"]
