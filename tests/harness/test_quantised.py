"""QuantizeCache: what it means in the ledger, in a run and to the judges; the bounds, from the definitions."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness_on_copies import LENGTHS, ONE_SHOT, TWO, decisive, fake, judge

import properties
from harness.execution import execute
from harness.judge import judge_program
from harness.judging import recut_limit
from harness.ledger import PoolLedger
from harness.lives import lives
from harness.operations import (
    Batch,
    BatchDecode,
    Chunk,
    Decode,
    Fork,
    Operation,
    Prefill,
    Program,
    QuantizeCache,
    Reset,
    Restore,
    SaveLoad,
    Snapshot,
    TrimFront,
)
from harness.quantised import bytes_of_a_row, largest_error
from harness.recording import record
from harness.retelling import untrimmed
from harness.tally import Tally
from harness.target import Capability
from harness.targets.reference import targets
from harness.witnessing import history
from reference_models.engine import storage as engine

BOUND = "quantised_rows_stay_within_their_bound"
QUANTISED: Any = ("int8", "affine8", "affine4")
TOUR = Program(
    (
        *(Prefill(6), TrimFront(2, 1), Snapshot(0), QuantizeCache("int8"), Chunk(3), Fork(1), Chunk(2, 1)),
        *(QuantizeCache("affine8"), SaveLoad(), Decode(2), Restore(0), Chunk(2), Reset(1), Prefill(3, 1)),
    ),
    TWO,
)


def storages(run: Any) -> list[str]:
    return [ledger.storage for ledger in run.ledgers]


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_it_is_done_once_and_where_all_rows_fit() -> None:
    pool = PoolLedger(("pool",), widths=((32, 8), (64, 32)))
    for kind in ("affine8", "affine4"):
        assert not pool.apply(QuantizeCache(kind)) and pool.sequences[0].refused
    assert pool.apply(QuantizeCache("int8")) and pool.sequences[0].state().storage == "int8"
    assert not pool.apply(QuantizeCache("int8")) and pool.sequences[0].refused
    assert PoolLedger(("pool",), widths=((32, 64),)).apply(QuantizeCache("affine4"))
    assert not PoolLedger(("pool",), storage="affine4").apply(QuantizeCache("int8"))


def test_what_the_model_owns_is_left_alone_and_not_refused() -> None:
    pool = PoolLedger(("model",), widths=((8, 8),))
    assert not pool.apply(QuantizeCache("affine8")) and not pool.sequences[0].refused
    assert pool.sequences[0].storage == "rows"


def test_copies_are_of_the_same_storage_and_a_reset_keeps_it() -> None:
    assert storages(execute(fake(), TOUR)) == ["rows", "int8"]
    assert storages(execute(fake(), Program(TOUR.operations[:10], TWO))) == ["int8", "int8"]


def test_who_stores_otherwise_stays_out_of_a_batch() -> None:
    program = Program((Prefill(3), Prefill(2, 1), QuantizeCache("int8", 1), Batch((0, 1)), BatchDecode(2)), TWO)
    for target in (fake(), targets("nemotron_nas")[0]):
        run = execute(target, program)
        assert not run.stopped and run.batch == (0,)
    both = Program((*program.operations[:3], QuantizeCache("int8"), *program.operations[3:]), TWO)
    run = execute(targets("nemotron_nas")[0], both)
    assert not run.stopped and run.batch == (0, 1)
    assert [len(forward.seen.given) for forward in run.steps[-1].forwards] == [1] * 4


# --- the judges -------------------------------------------------------------------------------------------------------

CAUGHT = [
    ("quantises too coarsely", (Prefill(9), QuantizeCache("int8"), Chunk(4)), "is held as"),
    ("quantises what does not fit", (Prefill(3), QuantizeCache("affine8")), "it was not refused, although"),
    ("refuses to quantise", (Prefill(3), QuantizeCache("int8")), "it was refused (told to), and nothing is in its way"),
    (
        "a refused quantisation trims",
        (Prefill(3), QuantizeCache("affine8")),
        "it was refused, and yet layer 1: offset 3, live_start 0, live_len 3 became",
    ),
    (
        "slots stay as large when quantised",
        (Prefill(3), QuantizeCache("int8")),
        "layer 1: a slot takes 20 bytes, allowed are 8",
    ),
]


@pytest.mark.parametrize(("bug", "operations", "message"), CAUGHT, ids=[bug for bug, _, _ in CAUGHT])
def test_a_bug_that_the_property_must_catch(bug: str, operations: Any, message: str) -> None:
    finding, _ = judge(fake(bug), Program(operations), BOUND)
    assert finding is not None and message in finding.message and "\n" not in finding.message
    assert judge(fake(), Program(operations), BOUND)[0] is None


@pytest.mark.parametrize(
    ("operations", "count"),
    [
        ((Prefill(3), Chunk(2)), 0),  # nothing is quantised
        ((QuantizeCache("int8"),), 0),  # and here nothing is held
        ((Prefill(3), QuantizeCache("int8")), 1),
        ((QuantizeCache("int8"), Prefill(3), Decode(2)), 2),
        ((QuantizeCache("affine4"),), 1),  # refused
        ((Prefill(3), QuantizeCache("int8"), QuantizeCache("int8")), 3),  # refused, and its rows stay what they were
    ],
)
def test_what_is_decisive(operations: tuple[Operation, ...], count: int) -> None:
    assert decisive(fake(), Program(operations), BOUND) == count
    assert decisive(fake(lacks=frozenset({Capability.ROWS})), Program(operations), BOUND) == 0


def test_of_what_the_model_owns_nothing_is_decisive() -> None:
    assert decisive(fake(), Program((Prefill(3), QuantizeCache("affine8")), ("model",)), BOUND) == 0


def test_a_right_target_is_not_reported_and_rows_may_change_as_they_are_quantised() -> None:
    assert judge(fake(), TOUR)[0] is None
    assert judge(fake(), TOUR, LENGTHS)[0] is None


def test_a_refusal_stands_in_the_trace() -> None:
    steps = record(execute(fake(), TOUR), None, {}).steps
    assert (steps[7]["must_be_refused"], steps[7]["refused"]) == (True, "told to") and "refused" not in steps[3]


# --- other ways to tell a run -----------------------------------------------------------------------------------------


def test_a_life_ends_where_what_it_saw_is_quantised_and_begins_as_it_is_stored() -> None:
    run = execute(
        fake(), Program((Prefill(3), Chunk(2), QuantizeCache("int8"), Chunk(2), Reset(), Prefill(6), Chunk(2)))
    )
    (longest,) = lives(run.owners, run.steps)
    assert (len(longest.spots), longest.storage) == (8, "int8")
    run = execute(fake(), Program((Prefill(3), Chunk(6), QuantizeCache("int8"), Chunk(2))))
    assert [(len(life.spots), life.storage) for life in lives(run.owners, run.steps)] == [(9, "rows")]
    assert judge(targets("nemotron_nas")[1], run.program, ONE_SHOT)[0] is None  # type: ignore[arg-type]


def test_what_is_left_out_leaves_no_other_storage_behind() -> None:
    """The quantisation of a trimmed sequence is left out; behind a reset its storage would be missing."""
    lost = (Prefill(4), TrimFront(1), QuantizeCache("int8"), Reset(), Prefill(3))
    run = execute(fake(), Program(lost))
    assert untrimmed(run.steps) == [0]
    kept = execute(fake(), Program((Prefill(4), QuantizeCache("int8"), TrimFront(1), Reset(), Prefill(3))))
    assert untrimmed(kept.steps) == [0, 1, 3, 4]


def test_the_tolerance_is_that_of_the_storages_that_were_read() -> None:
    assert recut_limit(execute(fake(), Program((Prefill(3), QuantizeCache("int8"))))) == 1e-4
    assert recut_limit(execute(fake(), Program((Prefill(3), QuantizeCache("int8"), Decode(1))))) == 5e-2


# --- the witnesses ----------------------------------------------------------------------------------------------------


def test_a_token_is_told_twice_where_it_is_read_in_two_ways() -> None:
    run = execute(fake(), Program((Prefill(2), QuantizeCache("int8"), Chunk(2))))
    told = history(run)
    assert told is not None
    assert told.storages.tolist() == ["rows", "int8", "rows", "int8", "int8", "int8"]
    assert told.itself.tolist() == [0, 0, 2, 2, 4, 5] and told.processed.tolist() == [0, 2, 4, 5]
    seen = [np.flatnonzero(row).tolist() for row in told.visible]
    assert seen == [[0], [0], [0, 2], [0, 2], [1, 3, 4], [1, 3, 4, 5]]
    plain = history(execute(fake(), Program((Prefill(2), Chunk(2)))))
    assert plain is not None and len(plain.tokens) == 4


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("family", ["cohere2", "mistral4", "nemotron_nas", "qwen2_vl", "qwen3_vl_moe"])
def test_both_witnesses_know_what_was_rounded_when(family: str, kind: Any) -> None:
    program = Program(
        (
            Prefill(3),
            Chunk(2),
            Fork(1),
            QuantizeCache(kind),
            Chunk(2),
            QuantizeCache("int8", 1),
            Chunk(2, 1),
            Decode(1),
        ),
        TWO,
    )
    for target in targets(family):
        if "of-32" not in target.variant.name or target.storage != "rows":
            continue
        tally = Tally()
        assert judge_program(target, program, properties.ALL, tally).run.steps[3].effective
        assert all(tally.properties[name].decisive_steps for name in (BOUND, "outputs_equal_the_witness"))


# --- the bounds -------------------------------------------------------------------------------------------------------

numbers = st.floats(-1e4, 1e4, width=32, allow_subnormal=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(numbers, min_size=32, max_size=32), st.sampled_from(QUANTISED))
def test_a_right_engine_stays_within_the_bound(row: list[float], kind: Any) -> None:
    rows = np.array(row, np.float32).reshape(1, 1, 1, 32)
    given_back = np.array(engine.decode(kind, engine.encode(kind, mx.array(rows)), mx.float32))
    assert (np.abs(given_back.astype(np.float64) - rows) <= largest_error(kind, rows)).all()


@pytest.mark.parametrize(("kind", "steps"), [("int8", 254), ("affine8", 255), ("affine4", 15)])
def test_the_bound_is_about_half_a_step(kind: str, steps: int) -> None:
    rows = np.random.default_rng(0).uniform(-1, 1, (2, 3, 40, 64)).astype(np.float32)
    assert 0.4 / steps < np.median(largest_error(kind, rows)) / 2 < 0.6 / steps
    assert not largest_error("rows", rows).any()


def test_bytes_of_a_row() -> None:
    assert [bytes_of_a_row(kind, 64) for kind in ("rows", *QUANTISED)] == [256, 66, 80, 48]
