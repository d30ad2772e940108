"""What tests of judging and of campaigns share: fake targets in a word, programs for them, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kv_harness_fake_target import FakeTarget

import properties
from harness.campaign import CampaignResult, run_campaign
from harness.findings import Finding, FindingError, Verdict
from harness.judge import judge_program
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Prefill,
    Program,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
)
from harness.profiles import Profile
from harness.tally import Tally

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
WITNESS = "outputs_equal_the_witness"
CACHE_FREE = "outputs_equal_the_cache_free_forward"
ATTENDED = "attention_equals_float64"
PURE = "operations_are_pure"
NEVER = "rollback_equals_never_speculated"
ONE_SHOT = "chunks_equal_one_shot"
KEEP = "batches_keep_their_rows"
SOLO = "batch_rows_equal_solo_runs"
WHOLE = (SAME, UNTRIMMED, WITNESS, CACHE_FREE)  # judged when the program has ended

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
#: What RICH has not: a restored snapshot, a fork that goes on, a file, a reset, quantised caches.
COPIES = Program(
    (
        Prefill(4),
        Snapshot(0),
        Chunk(2),
        Restore(0),
        Fork(1),
        Chunk(2),
        Chunk(2, 1),
        SaveLoad(),
        Reset(),
        Prefill(2),
        QuantizeCache("int8"),
    ),
    ("pool", "pool"),
)
#: Sequences of different lengths join, go forward together, lose keys, and leave, one of them without a word.
BATCHED = Program(
    (
        Prefill(6),
        Prefill(3, 1),
        Batch((0, 1)),
        BatchForward((2, 4)),
        BatchDecode(2),
        TrimFront(3, 0, 1),
        Rollback(2, 1),
        BatchForward((3, 1)),
        Batch((1, 2)),
        BatchForward((2,)),
        Batch((2, 1, 0)),
        BatchDecode(1),
        Chunk(2, 2),
        BatchDecode(1),
        Batch(()),
        Chunk(2),
        Decode(1, 1),
    ),
    ("pool", "pool", "pool"),
)
UNTOUCHED = Program((Prefill(6), Chunk(3), Decode(2)))
SMALL = Profile("small", programs=20, operations=6, shrink=False, patience=2)


TWO: Any = ("pool", "pool")
THREE: Any = ("pool", "pool", "pool")


def fake(*bugs: Any, **named: Any) -> FakeTarget:
    return FakeTarget(bugs=frozenset(bugs), **named)


def quirky(*quirks: Any, **named: Any) -> FakeTarget:
    return FakeTarget(quirks=frozenset(quirks), **named)


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


def campaign(*targets: FakeTarget, profile: Profile = SMALL, seed: int = 0, **named: Any) -> CampaignResult:
    return run_campaign("fake", targets, properties.ALL, profile, seed, **named)


def verdicts(result: CampaignResult) -> dict[str, Verdict]:
    return {one.id: one.verdict for one in result.properties}


def wide(*bugs: Any, **named: Any) -> FakeTarget:
    """With so many ids that hardly two tokens are the same."""
    return fake(*bugs, **{"vocab_size": 1000, **named})
