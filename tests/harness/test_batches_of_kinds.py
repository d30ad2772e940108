"""Batches of caches that forget by themselves, or lie in blocks: the ledger, what is judged, and what is retold."""

from __future__ import annotations

import dataclasses

import pytest

import properties
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import judge_program
from harness.ledger import PoolLedger
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Owner,
    Prefill,
    Program,
    Rollback,
    SaveLoad,
    TrimFront,
)
from harness.oracle import key_positions, of_layer
from harness.retelling import untrimmed, without_batches
from harness.rules import CacheRule
from harness.target import Capability
from harness.targets.reference import FAMILIES, ReferenceTarget, paths, targets
from harness.targets.reference_caches import KINDS, STORAGES
from reference_models.engine.batch_rows import Row

RING, PIECES = CacheRule(window=4), CacheRule(chunk=3)
TWO: tuple[Owner, ...] = ("pool", "pool")


def of(storage: str, family: str = "nemotron_nas") -> ReferenceTarget:
    return next(target for target in targets(family) if target.storage == storage)


#: A ring that has turned meets one that has not; both go on, go back, and leave.
PROGRAM = Program(
    (
        Prefill(9),
        Decode(2),
        Prefill(2, 1),
        Batch((1, 0)),
        BatchForward((4, 1)),
        BatchDecode(2),
        Rollback(2, 0),
        Rollback(2, 1),
        BatchForward((1, 3)),
        Rollback(2, 0),
        TrimFront(3, 0, 0),
        BatchDecode(1),
        Fork(1, 0),
        Chunk(2, 1),
        Batch((0, 1)),
        BatchForward((2, 5)),
        SaveLoad(0),
        Batch((1, 0)),
        BatchDecode(3),
    ),
    TWO,
)


def test_the_ledger_counts_the_padding_of_every_rule() -> None:
    """Where the longer row has forgotten, the shorter one needs less padding, or it is the longer one that does."""
    pool = PoolLedger(TWO, (None, RING, PIECES))
    pool.sequences[0].append(6)
    pool.sequences[1].append(2)
    pool.gather(Batch((0, 1)))
    first, second = pool.append((1, 3), 50)
    assert (first.padding, second.padding) == (0, 4)
    assert [of_layer(append, RING).padding for append in (first, second)] == [0, 1]
    assert [of_layer(append, PIECES).padding for append in (first, second)] == [2, 0]
    assert key_positions(of_layer(first, RING)).tolist() == [3, 4, 5, 6, -1, -1]
    assert key_positions(of_layer(second, PIECES)).tolist() == [0, 1, 2, 3, 4]


def test_a_sequence_alone_has_no_padding_on_any_layer() -> None:
    pool = PoolLedger(("pool",), (None, RING))
    append = pool.sequences[0].append(5)
    assert of_layer(append, RING).padding == 0 == append.padding


@pytest.mark.parametrize("storage", [name for name in (*STORAGES, *KINDS) if name != "rotating-layers"])
def test_every_property_holds(storage: str) -> None:
    evidence = judge_program(of(storage), PROGRAM, properties.ALL)
    steps = evidence.run.steps
    assert [step.index for step in steps if step.refuses] == {
        "rotating-6": [6, 7],
        "rotating-9-sinks-3": [6, 10],
        "chunked-5": [],
    }.get(storage, [])


@pytest.mark.parametrize(
    ("family", "path"), [(family, path) for family in FAMILIES for path in paths(family)], ids="-".join
)
def test_every_kind_of_cache_has_batches(family: str, path: str) -> None:
    some = targets(family, path=path)  # type: ignore[arg-type]
    assert all(Capability.BATCH in target.capabilities for target in some)


def test_a_row_that_should_refuse_and_does_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "check_rollback", lambda self, n: None)
    with pytest.raises(FindingError, match="it was not refused, although a cache no longer has what would be needed"):
        judge_program(of("rotating-6"), PROGRAM, properties.ALL)


def test_rows_that_have_forgotten_are_not_told_as_untrimmed() -> None:
    """The other mask policy would be wrong for them: what it counts as held is gone."""
    operations = (
        Prefill(3),
        Prefill(3, 1),
        Batch((0, 1)),
        BatchDecode(2),
        BatchForward((2, 1)),
        Batch(()),
        Chunk(2, 1),
    )
    steps = execute(of("rotating-6"), Program(operations, TWO)).steps
    assert [any(told.state.forgotten for told in step.told) for step in steps] == [False] * 6 + [True]
    assert untrimmed(steps) == [0, 1, 2, 3, 4, 5]
    longer = execute(of("rotating-6"), Program((*operations[:4], BatchForward((4, 1)), BatchDecode(2)), TWO)).steps
    assert untrimmed(longer) == [0, 1, 2, 3, 4]
    assert untrimmed(execute(of("rows"), Program(operations, TWO)).steps) == list(range(7))


def test_a_layer_may_lose_all_that_others_hold() -> None:
    """Back at the start of a chunk a chunked cache has no row to compare, in a batch not even buffers."""
    program = Program((Prefill(8), Batch((0, 1)), BatchDecode(1), Rollback(4, 0), BatchDecode(2)), TWO)
    steps = judge_program(of("chunked-5"), program, properties.ALL).run.steps
    assert [step.expected_removed for step in steps] == [None, None, None, 4, None]


def test_alone_the_rows_refuse_the_same() -> None:
    target = of("rotating-6")
    run = execute(target, PROGRAM)
    lines = without_batches(run.steps)
    alone = execute(target, Program(tuple(line.numbered[0] for line in lines), TWO))
    twins = [(line.step.refuses, step.refuses) for line, step in zip(lines, alone.steps, strict=True) if step.removal]
    assert twins and all(together == solo for together, solo in twins) and any(solo for _, solo in twins)


def test_the_offset_policy_is_found_in_a_batch_of_rings() -> None:
    target = dataclasses.replace(of("rotating-6"), policy="offset")
    program = Program((Prefill(8), Prefill(2, 1), Batch((0, 1)), BatchForward((2,))), TWO)
    with pytest.raises(FindingError, match="the mask has 10 keys, attention received 7"):
        judge_program(target, program, [properties.BY_ID["mask_key_axis_equals_live_keys"]])
