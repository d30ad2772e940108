"""The operation language: JSON both ways, every field that cannot mean anything, bounds, how it reads."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.media import Media
from harness.operations import (
    MAX_COUNT,
    MAX_OPERATIONS,
    MAX_SEQUENCES,
    MAX_SLOTS,
    MAX_TOKENS,
    MAX_TOTAL_TOKENS,
    OPERATIONS,
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
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
    operation_from_json,
    tokens_of,
)

counts = st.integers(0, MAX_COUNT)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    owners = draw(st.lists(st.sampled_from(("pool", "model")), min_size=1, max_size=4))
    where = st.integers(0, len(owners) - 1)
    tokens = st.one_of(st.integers(1, 40), st.integers(1, MAX_TOTAL_TOKENS // 10))  # ten of them fit into a program
    operation = st.one_of(
        st.builds(Prefill, tokens, where),
        st.builds(Chunk, tokens, where),
        st.builds(Decode, tokens, where),
        st.builds(TrimFront, counts, counts, where),
        st.builds(
            EnforceMaxKvSize,
            st.integers(1, MAX_COUNT),
            st.sampled_from(("trim", "sinks", "shift")),
            counts,
            counts,
            where,
        ),
        st.builds(Rollback, counts, where),
        tokens.flatmap(lambda drafts: st.builds(Verify, st.just(drafts), st.integers(0, drafts), where)),
        st.builds(Snapshot, st.integers(0, MAX_SLOTS - 1), where),
        st.builds(Restore, st.integers(0, MAX_SLOTS - 1), where),
        st.permutations(range(len(owners))).map(lambda p: Fork(p[0], p[1]) if len(p) > 1 else Chunk(1)),
        st.builds(SaveLoad, where),
        st.builds(Reset, where),
        st.builds(QuantizeCache, st.sampled_from(("int8", "affine8", "affine4")), where),
        st.permutations(range(len(owners))).map(lambda rows: Batch(tuple(rows))),
        st.lists(st.integers(1, 40), min_size=1, max_size=4).map(lambda tokens: BatchForward(tuple(tokens))),
        st.builds(BatchDecode, st.integers(1, 40)),
    )
    return Program(tuple(draw(st.lists(operation, max_size=10))), tuple(owners))


def refused(action: Any, *arguments: Any, **named: Any) -> str:
    """The message of the refusal: one short line."""
    with pytest.raises(OperationError) as caught:
        action(*arguments, **named)
    message = str(caught.value)
    assert "\n" not in message and 0 < len(message) < 270
    return message


@settings(max_examples=60, deadline=None)
@given(programs())
def test_json_gives_the_same_program_back(program: Program) -> None:
    text = json.dumps(program.to_json())
    again = Program.from_json(json.loads(text))
    assert again == program and hash(again) == hash(program)
    assert str(again) == str(program)
    assert json.dumps(again.to_json()) == text


def valid(kind: type[Operation]) -> dict[str, Any]:
    """JSON of one valid operation with every field."""
    special: dict[type[Operation], Operation] = {
        EnforceMaxKvSize: EnforceMaxKvSize(7),
        Verify: Verify(5, 0),
        Snapshot: Snapshot(3),
        Restore: Restore(3),
        Fork: Fork(5, 7),
        SaveLoad: SaveLoad(),
        Reset: Reset(),
        QuantizeCache: QuantizeCache("affine8"),
        Batch: Batch((0, 2)),
        BatchForward: BatchForward((5, 1)),
    }
    made = special[kind] if kind in special else kind(5)  # type: ignore[call-arg]
    return made.to_json()


NUMBERS = [
    (kind, f.name)
    for kind in OPERATIONS
    for f in dataclasses.fields(kind)
    if f.name not in ("generation", "media", "storage") and kind not in (Batch, BatchForward)  # lists: see test_batches
]


@pytest.mark.parametrize(("kind", "name"), NUMBERS, ids=[f"{k.__name__}-{n}" for k, n in NUMBERS])
@pytest.mark.parametrize(
    "value", [True, False, 1.0, 1.5, float("nan"), float("inf"), "1", None, [1], {}, -1, MAX_COUNT + 1, 10**4000]
)
def test_a_number_that_is_no_count_is_refused(kind: type[Operation], name: str, value: object) -> None:
    message = refused(operation_from_json, {**valid(kind), name: value})
    assert message.startswith(f"{kind.__name__}: {name} must ")


@pytest.mark.parametrize("kind", [kind for kind in OPERATIONS if kind not in (Batch, BatchForward, QuantizeCache)])
def test_bounds_are_inclusive(kind: type[Operation]) -> None:
    first = dataclasses.fields(kind)[0].name
    low = 0 if kind in (TrimFront, Rollback, Snapshot, Restore, Fork, SaveLoad, Reset) else 1
    high = MAX_COUNT if kind in (TrimFront, Rollback, EnforceMaxKvSize) else MAX_TOKENS
    high = MAX_SLOTS - 1 if kind in (Snapshot, Restore) else high
    high = MAX_SEQUENCES - 1 if kind in (Fork, SaveLoad, Reset) else high
    for value in (low, high):
        made = operation_from_json({**valid(kind), first: value})
        assert getattr(made, first) == value
    for value in (low - 1, high + 1):
        assert f"[{low}, {high}]" in refused(operation_from_json, {**valid(kind), first: value})
    if kind is BatchDecode:
        return
    assert operation_from_json({**valid(kind), "sequence": MAX_SEQUENCES - 1}).index == MAX_SEQUENCES - 1
    refused(operation_from_json, {**valid(kind), "sequence": MAX_SEQUENCES})


@pytest.mark.parametrize("kind", OPERATIONS)
def test_missing_and_extra_fields_are_refused(kind: type[Operation]) -> None:
    data = valid(kind)
    assert "no field 'zeta'" in refused(operation_from_json, {**data, "zeta": 1})
    assert "unknown operation None" in refused(operation_from_json, {k: v for k, v in data.items() if k != "op"})
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    for name in required:
        message = refused(operation_from_json, {k: v for k, v in data.items() if k != name})
        assert "lacks a field" in message and name in message


@pytest.mark.parametrize("data", [None, 3, "prefill", [], [["op", "prefill"]], True])
def test_an_operation_must_be_an_object(data: object) -> None:
    assert "must be an object" in refused(operation_from_json, data)


@pytest.mark.parametrize("code", [None, 0, True, [], {}, "Prefill", "", "x" * 10_000, "a\nb"])
def test_an_unknown_code_is_refused_and_the_known_are_named(code: object) -> None:
    message = refused(operation_from_json, {"op": code, "tokens": 1})
    assert "prefill" in message and "rollback" in message


@pytest.mark.parametrize("storage", ["rows", "Int8", "", None, 8, True, [], {}, "x" * 10_000])
def test_an_unknown_storage_is_refused(storage: object) -> None:
    assert "int8, affine8, affine4" in refused(operation_from_json, {"op": "quantize_cache", "storage": storage})
    assert QuantizeCache("affine4", 3).text() == "QuantizeCache(affine4)"


@pytest.mark.parametrize("generation", ["Trim", "", None, 1, True, [], {}, "x" * 10_000])
def test_an_unknown_generation_is_refused(generation: object) -> None:
    assert "trim, sinks, shift" in refused(operation_from_json, {**valid(EnforceMaxKvSize), "generation": generation})


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "",
        {},
        {"owners": ["pool"]},
        {"operations": []},
        {"owners": ["pool"], "operations": [], "name": ""},
        {"owners": "pool", "operations": []},
        {"owners": {"pool": 1}, "operations": []},
        {"owners": ["pool"], "operations": {}},
        {"owners": [], "operations": []},
        {"owners": ["pool"] * (MAX_SEQUENCES + 1), "operations": []},
        {"owners": ["Pool"], "operations": []},
        {"owners": [None], "operations": []},
        {"owners": [["pool"]], "operations": []},
        {"owners": ["pool"], "operations": [None]},
        {"owners": ["pool"], "operations": [Prefill(1, 1).to_json()]},
        {"owners": ["pool"], "operations": [Rollback(1).to_json()] * (MAX_OPERATIONS + 1)},
        {"owners": ["pool"], "operations": [Decode(MAX_TOKENS).to_json()] * (MAX_TOTAL_TOKENS // MAX_TOKENS + 1)},
    ],
)
def test_a_program_that_means_nothing_is_refused(data: object) -> None:
    refused(Program.from_json, data)


@pytest.mark.parametrize("accept", [-1, 6, True, 2.0, None, "1"])
def test_no_more_drafts_are_accepted_than_there_were(accept: object) -> None:
    assert "accept must" in refused(operation_from_json, {"op": "verify", "drafts": 5, "accept": accept})
    assert Verify(5, 5).accept == 5


def test_a_fork_needs_another_sequence_that_there_is() -> None:
    assert "another sequence than 1" in refused(Fork, 1, 1)
    assert "Fork(into=2) names sequence 2 of 2" in refused(Program, (Fork(2),), ("pool", "pool"))
    assert "Fork(into=1) names sequence 1 of 1" in refused(Program, (Fork(1),))


IMAGE = (Media(0, 1, 2),)
LATER = Prefill(3, media=IMAGE)


@pytest.mark.parametrize(
    ("before", "owners"),
    [
        ((Prefill(2), Reset()), ("pool",)),
        ((Snapshot(0), Prefill(2), Restore(0)), ("pool",)),
        ((Prefill(2), Fork(0, 1)), ("pool", "pool")),
        ((Prefill(2), Prefill(2, 1), Snapshot(3, 1), Reset(1), Fork(0, 1)), ("pool", "pool")),
    ],
)
def test_images_may_come_first_again(before: tuple[Operation, ...], owners: Any) -> None:
    program = Program((*before, LATER), owners)
    assert Program.from_json(program.to_json()) == program


@pytest.mark.parametrize(
    ("before", "owners"),
    [
        ((Prefill(2),), ("pool",)),
        ((Verify(2, 0),), ("pool",)),
        ((Prefill(2), Rollback(2)), ("pool",)),
        ((Prefill(2), Reset()), ("model",)),  # out of the pool's reach
        ((Prefill(2), Restore(0)), ("pool",)),  # nothing in the slot
        ((Prefill(2), Snapshot(0), Reset(), Restore(0)), ("pool",)),
        ((Prefill(2, 1), Fork(0, 1)), ("pool", "pool")),
        ((Prefill(2), Fork(0, 1)), ("model", "pool")),
        ((Prefill(2), Fork(0, 1)), ("pool", "model")),
        ((Prefill(2, 1), Snapshot(0, 1), Restore(0)), ("pool", "pool")),
        ((Prefill(2), Reset(), Prefill(1)), ("pool",)),
    ],
)
def test_images_come_first_or_not_at_all(before: tuple[Operation, ...], owners: Any) -> None:
    assert "not the first forward" in refused(Program, (*before, LATER), owners)


def test_tokens_of_a_program_are_bounded_before_anything_is_allocated() -> None:
    fits = MAX_TOTAL_TOKENS // MAX_TOKENS
    assert len(Program((Chunk(MAX_TOKENS),) * fits).operations) == fits
    assert [tokens_of(op) for op in (Prefill(2), Chunk(3), Decode(4), Verify(5, 1), Rollback(6), Reset())] == [
        *(2, 3, 4, 5),
        *(0, 0),
    ]
    for extra in (Prefill(1), Chunk(1), Decode(1), Verify(1, 0)):
        assert str(MAX_TOTAL_TOKENS + 1) in refused(Program, (Chunk(MAX_TOKENS),) * fits + (extra,))


def test_what_may_be_asked_for() -> None:
    """Raising a bound needs a thought: the scores of the largest program take [heads, 2048, 8192] numbers."""
    assert (MAX_TOKENS, MAX_TOTAL_TOKENS, MAX_OPERATIONS) == (2048, 8192, 2000)


def test_the_count_of_operations_is_checked_before_they_are_built() -> None:
    rubbish: list[object] = [None] * (MAX_OPERATIONS + 1)
    assert "at most" in refused(Program.from_json, {"owners": ["pool"], "operations": rubbish})


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (Prefill(10), "Prefill(10)"),
        (Chunk(4, 3), "Chunk(4)"),
        (Decode(), "Decode(1)"),
        (Decode(2), "Decode(2)"),
        (TrimFront(4), "TrimFront(4)"),
        (TrimFront(4, 1), "TrimFront(4, keep=1)"),
        (Rollback(0), "Rollback(0)"),
        (Verify(4, 0), "Verify(4, accept=0)"),
        (Verify(4, 2, 1), "Verify(4, accept=2)"),
        (Snapshot(0, 2), "Snapshot(0)"),
        (Restore(3), "Restore(3)"),
        (Fork(1), "Fork(into=1)"),
        (SaveLoad(1), "SaveLoad()"),
        (Reset(), "Reset()"),
        (Batch((2, 0)), "Batch(2, 0)"),
        (Batch(()), "Batch()"),
        (BatchForward((1, 4)), "BatchForward(1, 4)"),
        (BatchDecode(3), "BatchDecode(3)"),
        (EnforceMaxKvSize(8), "EnforceMaxKvSize(8)"),
        (EnforceMaxKvSize(8, "shift", 0, 3), "EnforceMaxKvSize(8, generation=shift, keep=0, n_discard=3)"),
    ],
)
def test_an_operation_reads_as_it_is_written(operation: Operation, text: str) -> None:
    assert operation.text() == text


def test_a_program_reads_as_one_line() -> None:
    assert str(Program((Prefill(10), TrimFront(4), Chunk(4)))) == "Prefill(10) ; TrimFront(4) ; Chunk(4)"
    assert str(Program(())) == "(nothing)"
    two = Program((Prefill(2), Decode(1, 1)), ("pool", "model"))
    assert str(two) == "s0:Prefill(2) ; s1:Decode(1)   [s0 pool-owned, s1 model-owned]"
    assert str(Program((Prefill(2),), ("model",))) == "Prefill(2)   [s0 model-owned]"
