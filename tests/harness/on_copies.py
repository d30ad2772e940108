"""What tests of copies, files and resets share: a fake target with many token ids, a program, and what came of it."""

from __future__ import annotations

from typing import Any

from kv_harness_fake_target import FakeTarget

import properties
from harness.execution import Execution
from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.operations import (
    Chunk,
    Decode,
    Fork,
    Prefill,
    Program,
    Reset,
    Restore,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.tally import Tally

LENGTHS = "keys_equal_ledger_live_length"
COMPLETES = "every_operation_completes"
SNAPSHOT = "snapshots_give_back_what_they_took"
FORK = "forks_share_nothing"
ISOLATED = "sequences_are_isolated"
SAVED = "save_and_load_change_nothing"
MEMORY = "memory_is_given_back"
NEVER = "rollback_equals_never_speculated"
ONE_SHOT = "chunks_equal_one_shot"
TWO: Any = ("pool", "pool")

#: Reaches everything that this file is about.
TOUR = Program(
    (
        Prefill(6),
        Snapshot(0),
        Chunk(3),
        TrimFront(4),
        Restore(0),
        Chunk(2),
        Fork(1),
        Chunk(2, 1),
        Decode(2),
        Verify(4, 1),
        Decode(1),
        TrimFront(2, 1),
        SaveLoad(),
        Chunk(2),
        Reset(),
        Prefill(3),
    ),
    TWO,
)


def fake(*bugs: Any, **named: Any) -> FakeTarget:
    return FakeTarget(bugs=frozenset(bugs), **{"vocab_size": 1000, **named})


def judge(target: FakeTarget, program: Program, *ids: str) -> tuple[Finding | None, Tally]:
    tally = Tally()
    try:
        judge_program(target, program, [p for p in properties.ALL if not ids or p.id in ids], tally)
    except FindingError as error:
        return error.finding, tally
    return None, tally


def decisive(target: FakeTarget, program: Program, name: str) -> int:
    finding, tally = judge(target, program, name)
    assert finding is None
    return tally.properties[name].decisive_steps if name in tally.properties else 0


def tokens(run: Execution, step: int) -> tuple[int, ...]:
    return sum((forward.seen.tokens for forward in run.steps[step].forwards), ())
