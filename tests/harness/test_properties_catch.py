"""Every property on a fake target: bugs that it must catch, in its words, and variations that it must not report."""

from __future__ import annotations

import pytest
from kv_harness_fake_target import FakeTarget
from kv_harness_on_fakes import (
    BATCHED,
    CACHE_FREE,
    COMPLETES,
    CONTENT,
    COPIES,
    FINITE,
    LENGTHS,
    POSITIONS,
    REMOVED,
    RICH,
    ROWS,
    SAME,
    UNTRIMMED,
    WHOLE,
    WIDTH,
    WITNESS,
    fake,
    judge,
    quirky,
)

import properties
from harness.target import Capability

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
    *(
        (judge_of_outputs, fake(bug), step, message)
        for judge_of_outputs in (WITNESS, CACHE_FREE)
        for bug, step, message in (
            (
                "logits without the oldest row after a trim",
                4,
                "Chunk(3), forward 0: the logits of the token at position 9 differ at entry",
            ),
            ("logits without the oldest row after a trim", 4, "5 keys held, chunk of 3)"),
            ("logits without the newest row after a rollback", 7, "forward 0: the logits of the token at position 12"),
            ("logits a little off after a trim", 4, "of the logits' deviation, 5e-05 allowed; 5 keys held"),
            ("nan logits after a trim", 4, "differ at entry 3: nan from the target"),
        )
    ),
    (WITNESS, fake("logits a little off after a trim"), 4, "from the float64 witness (largest difference"),
    (CACHE_FREE, fake("logits a little off after a trim"), 4, "from the target's forward without a cache (largest"),
    (
        CACHE_FREE,
        fake("logits a little off after a trim", lacks=frozenset({Capability.WITNESS})),
        4,
        "from the target's forward without a cache",
    ),
]


@pytest.mark.parametrize(("property_id", "target", "step", "message"), CAUGHT)
def test_a_bug_that_the_property_must_catch(property_id: str, target: FakeTarget, step: int, message: str) -> None:
    finding = judge(target, RICH, property_id).finding
    assert finding is not None
    assert (finding.property_id, finding.violation.step) == (property_id, step)
    assert message in finding.message and "\n" not in finding.message
    assert finding.target == f"fake/fake@{target.policy}-mask"
    assert finding.program.operations == (RICH.operations if property_id in WHOLE else RICH.operations[: step + 1])
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
    outcomes = [judge(fake(), program) for program in (RICH, COPIES, BATCHED)]
    assert [outcome.finding for outcome in outcomes] == [None, None, None]
    assert {p.id for p in properties.ALL if not any(outcome.decisive(p.id) for outcome in outcomes)} == set()


def test_rows_that_do_not_match_the_positions_are_left_to_the_lengths() -> None:
    outcome = judge(fake("neighbour trimmed too"), RICH, ROWS)
    assert outcome.finding is None and outcome.decisive(ROWS) > 0


def test_a_forward_without_a_cache_that_raises_is_a_finding() -> None:
    finding = judge(fake("raises without a cache"), RICH, CACHE_FREE).finding
    assert finding is not None and finding.violation.step is None
    assert finding.message == ("the target's forward without a cache raised RuntimeError: no way without a cache")


def test_a_near_tie_excuses_only_what_rounding_can_do() -> None:
    """Rows of an Int8 cache that may round either way allow for a little; nothing is said where experts nearly tie;
    and neither excuses what is no number."""
    little, much = "logits a little off after a trim", "logits without the oldest row after a trim"
    rounding, tie = frozenset({"rows nearly round to others"}), frozenset({"experts nearly tie"})
    for property_id in (WITNESS, CACHE_FREE):
        for bug, quirks, found in (
            (little, rounding, False),
            (much, rounding, True),
            (much, tie, False),
            ("nan logits after a trim", tie, True),
        ):
            finding = judge(fake(bug, quirks=quirks), RICH, property_id).finding
            assert (finding is not None) is found, (property_id, bug, quirks)
        finding = judge(fake(much, quirks=rounding), RICH, property_id).finding
        assert finding is not None and "0.05 allowed" in finding.message
