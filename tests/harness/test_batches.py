"""Batches: what they mean in the ledger and in a run, as text and as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kv_harness_on_fakes import (
    BATCHED,
    COMPLETES,
    THREE,
    TWO,
    judge,
    wide,
)

from harness.batches import rows_after, tokens_in_batch
from harness.capability import needs
from harness.execution import execute
from harness.ledger import PoolLedger
from harness.operations import (
    MAX_SEQUENCES,
    MAX_TOKENS,
    MAX_TOTAL_TOKENS,
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    OperationError,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
    operation_from_json,
)
from harness.target import Capability
from harness.witnessing import history

# --- who is in it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "operation", "after"),
    [
        ((), Batch((0, 1)), (0, 1)),
        ((), Batch((2, 0)), (2, 0)),
        ((0, 1), Batch((1, 0)), (1, 0)),  # both stay, in another order
        ((0,), Batch((2, 1, 0)), (0, 2, 1)),  # who joins comes behind who stays
        ((0, 1, 2), Batch((2, 0)), (2, 0)),
        ((0, 1), Batch(()), ()),
        ((0, 1), BatchForward((3,)), (0, 1)),
        ((0, 1), BatchDecode(2), (0, 1)),
        ((0, 1), TrimFront(2, 0, 1), (0, 1)),
        ((0, 1), Rollback(2, 1), (0, 1)),
        ((0, 1), EnforceMaxKvSize(4, sequence=1), (0, 1)),
        ((0, 1), Prefill(2), (1,)),
        ((0, 1), Chunk(2, 1), (0,)),
        ((0, 1), Decode(1, 1), (0,)),
        ((0, 1), Verify(2, 1, 1), (0,)),
        ((0, 1), Chunk(2, 2), (0, 1)),  # of a bystander
        ((0, 1), Snapshot(0, 1), (0,)),
        ((0, 1), Restore(0, 1), (0,)),
        ((0, 1), SaveLoad(1), (0,)),
        ((0, 1), Reset(1), (0,)),
        ((0, 1, 2), Fork(2, 0), (1,)),  # both of them
    ],
    ids=str,
)
def test_who_joins_stays_and_leaves(before: tuple[int, ...], operation: Operation, after: tuple[int, ...]) -> None:
    assert rows_after(before, operation, THREE) == after
    pool = PoolLedger(THREE)
    pool.batch = before
    assert pool.gather(operation) == (before != after) and pool.batch == after


def test_what_the_model_owns_never_joins() -> None:
    owners: Any = ("pool", "model", "pool")
    assert rows_after((), Batch((1, 0, 2)), owners) == (0, 2)
    run = execute(wide(), Program((Prefill(3, 1), Batch((1, 0)), BatchForward((2,)), Chunk(1, 1)), owners))
    assert [step.rows for step in run.steps] == [(), (0,), (0,), (0,)]
    assert [f.sequence for f in run.steps[2].forwards] == [0] and run.steps[1].effective
    assert run.steps[3].forwards[0].append.held == (0, 1, 2)


def test_a_target_that_batches_by_itself_is_told_without_padding() -> None:
    pool = PoolLedger(THREE, pads=False)
    pool.sequences[0].append(5, 0)
    pool.gather(Batch((0, 1)))
    appends = pool.append((1, 3), 5)
    assert [(a.padding, a.behind, a.rows, a.slots) for a in appends] == [(0, 0, 2, 6), (0, 0, 2, 3)]


def test_nothing_happens_without_a_row() -> None:
    run = execute(wide(), Program((BatchForward((3,)), BatchDecode(2), Batch(()), Prefill(1)), TWO))
    assert not run.stopped and [len(step.forwards) for step in run.steps] == [0, 0, 0, 1]
    assert run.steps[2].effective is False


def test_the_ledger_counts_padding_on_both_sides() -> None:
    pool = PoolLedger(THREE)
    for number, count in enumerate((5, 2, 0)):
        if count:
            pool.sequences[number].append(count, 10 * number)
    pool.sequences[0].trim_front(2, 1)  # holds 0, 3, 4
    pool.gather(Batch((0, 2, 1)))
    first, empty, last = pool.append((1, 3, 2), 50)
    assert [(a.padding, a.behind, a.rows, a.slots) for a in (first, empty, last)] == [
        (0, 2, 3, 6),
        (3, 0, 3, 6),
        (1, 1, 3, 6),
    ]
    assert (first.held, first.positions, first.numbers) == ((0, 3, 4), range(5, 6), range(50, 51))
    assert (empty.positions, empty.numbers) == (range(3), range(51, 54))
    assert (last.held_numbers, last.positions, last.numbers) == ((10, 11), range(2, 4), range(54, 56))


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_batch_gives_every_sequence_its_own_tokens_and_a_forward() -> None:
    program = Program((Prefill(3), Batch((1, 0)), BatchForward((2, 1)), BatchDecode(2), Chunk(2, 1)), TWO)
    run = execute(wide(), program)
    assert not run.stopped and run.program == program
    ragged, decode, alone = run.steps[2:]
    assert [(f.sequence, f.number, len(f.seen.tokens)) for f in ragged.forwards] == [(1, 0, 2), (0, 3, 1)]
    assert [f.sequence for f in decode.forwards] == [1, 0, 1, 0]
    assert (alone.rows, alone.told[1].held, alone.told[0].held) == ((0,), tuple(range(6)), tuple(range(6)))
    assert ragged.acted == {0, 1} and alone.acted == {1}
    alone_from_the_start = execute(wide(), Program((Prefill(3), Chunk(1), Decode(2))))
    mine = [f.seen.tokens for step in run.steps for f in step.forwards if f.sequence == 0]
    assert mine == [f.seen.tokens for step in alone_from_the_start.steps for f in step.forwards]


def test_the_numbers_of_tokens_run_through_all_rows() -> None:
    run = execute(wide(), BATCHED)
    numbers = [n for step in run.steps for f in step.forwards for n in f.append.numbers]
    assert numbers == list(range(len(numbers)))
    told = history(run)
    assert told is not None and len(told.tokens) == len(numbers) and not told.visible[6:9, :6].any()


def test_the_queries_of_padding_are_not_seen_and_its_keys_are() -> None:
    run = execute(wide(), Program((Prefill(3), Batch((0, 1)), BatchForward((1, 4))), TWO))
    short, long = run.steps[2].forwards
    for forward, l in ((short, 1), (long, 4)):
        (call, _), (given,) = forward.seen.attention, forward.seen.positions
        assert (call.query_len, call.key_len, forward.append.slots) == (l, 7, 7)
        assert call.shown is not None and call.shown.shape == (1, 1, l, 7) and given.positions.shape[-1] == l
        assert forward.seen.logits is not None and len(forward.seen.logits) == l


@pytest.mark.parametrize("bug", ["a ragged batch raises", "joining raises"])
def test_an_error_of_a_batch_stops_the_run_and_is_found(bug: str) -> None:
    run = execute(wide(bug), BATCHED)
    assert run.stopped and len(run.steps) < len(BATCHED.operations)
    finding = judge(wide(bug), BATCHED, COMPLETES).finding
    assert finding is not None and "raised" in finding.message and "\n" not in finding.message


# --- as text, as JSON, and what it may not be -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"op": "batch"}, "lacks a field"),
        ({"op": "batch", "rows": 1}, "must be a list of at most"),
        ({"op": "batch", "rows": "01"}, "must be a list of at most"),
        ({"op": "batch", "rows": {"0": 1}}, "must be a list of at most"),
        ({"op": "batch", "rows": None}, "must be a list of at most"),
        ({"op": "batch", "rows": [0, 0]}, "twice"),
        ({"op": "batch", "rows": [0, True]}, "whole number"),
        ({"op": "batch", "rows": [0.0]}, "whole number"),
        ({"op": "batch", "rows": [[0]]}, "whole number"),
        ({"op": "batch", "rows": [None]}, "whole number"),
        ({"op": "batch", "rows": [-1]}, "must lie in"),
        ({"op": "batch", "rows": [MAX_SEQUENCES]}, "must lie in"),
        ({"op": "batch", "rows": [10**4000]}, "must lie in"),
        ({"op": "batch", "rows": list(range(MAX_SEQUENCES + 1))}, "at most"),
        ({"op": "batch", "rows": [0], "sequence": 0}, "no field 'sequence'"),
        ({"op": "batch_forward", "tokens": []}, "at least one number"),
        ({"op": "batch_forward", "tokens": 3}, "must be a list"),
        ({"op": "batch_forward", "tokens": [0]}, "must lie in"),
        ({"op": "batch_forward", "tokens": [MAX_TOKENS + 1]}, "must lie in"),
        ({"op": "batch_forward", "tokens": ["3"]}, "whole number"),
        ({"op": "batch_forward", "tokens": [float("nan")]}, "whole number"),
        ({"op": "batch_forward", "tokens": [1] * (MAX_SEQUENCES + 1)}, "at most"),
        ({"op": "batch_decode", "times": [1]}, "whole number"),
        ({"op": "batch_decode", "times": 0}, "must lie in"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_cannot_mean_anything_is_refused_in_one_line(data: dict[str, Any], said: str) -> None:
    with pytest.raises(OperationError, match=said) as caught:
        operation_from_json(data)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 250


def test_lists_become_tuples_and_go_back() -> None:
    for operation in (Batch((2, 0)), Batch(()), BatchForward((3, 1)), BatchDecode(4)):
        data = json.loads(json.dumps(operation.to_json()))
        assert operation_from_json(data) == operation and hash(operation_from_json(data)) == hash(operation)
    assert Batch((1, 0)).to_json() == {"op": "batch", "rows": [1, 0]}
    with pytest.raises(OperationError, match="list"):
        Batch([0, 1])  # type: ignore[arg-type]


def test_a_program_names_only_sequences_that_there_are_and_reads_as_one_line() -> None:
    with pytest.raises(OperationError, match=r"Batch\(0, 2\) names sequence 2 of 2"):
        Program((Batch((0, 2)),), TWO)
    assert str(Program((Prefill(2, 1), Batch((0, 1)), BatchDecode(2)), TWO)).startswith(
        "s1:Prefill(2) ; Batch(0, 1) ; BatchDecode(2)   ["
    )


def test_tokens_of_batches_are_bounded_as_if_all_sequences_were_rows() -> None:
    assert tokens_in_batch(BatchForward((3, 1)), 4) == 3 + 1 + 1 + 1 and tokens_in_batch(BatchDecode(5), 3) == 15
    assert tokens_in_batch(Chunk(3), 4) == tokens_in_batch(Batch((0,)), 4) == 0
    assert BatchForward((3, 1)).of(1) == (3,) and BatchForward((3,)).of(3) == (3, 3, 3)
    owners: Any = ("pool",) * 8
    most = MAX_TOTAL_TOKENS // 8
    assert Program((BatchForward((most,)),), owners).operations and Program((BatchDecode(most),), owners).operations
    for operation in (BatchForward((most + 1, most)), BatchDecode(most + 1)):
        with pytest.raises(OperationError, match="processes at most"):
            Program((operation,), owners)


def test_a_program_says_that_it_needs_batches() -> None:
    for operation in (Batch((0,)), BatchForward((1,)), BatchDecode(1)):
        assert needs(Program((operation,))) == {Capability.BATCH}
