"""Memory that caches need not hold, and memory that no table of a sequence counts."""

from __future__ import annotations

from typing import Any

import pytest
from kv_harness_on_copies import MEMORY, TWO, decisive, fake, judge

import properties
from harness.emptying import Emptied
from harness.execution import Execution, execute
from harness.faults import FAULTS, VARIATIONS
from harness.faults.memory import FAULTS as OF_MEMORY
from harness.judge import judge_program
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
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.target import CacheMemory, Capability, CopyObservation
from harness.targets.reference import ReferenceTarget, targets
from harness.targets.reference_session import ReferenceSession

KEPT = "nothing_is_kept_alive"


def program(*operations: Operation, owners: Any = ("pool",)) -> Program:
    return Program(operations, owners)


# --- growth -----------------------------------------------------------------------------------------------------------


def test_buffers_far_ahead_of_their_keys_are_found_at_once() -> None:
    finding, _ = judge(fake("allocates far ahead"), program(Prefill(3), Decode(2)), MEMORY)
    assert finding is not None and finding.violation.step == 0
    assert finding.message == (
        "layer 1: the cache of sequence 0 holds 32768 bytes after Prefill(3), allowed are 2096 (slots of 8 bytes, for "
        "twice the 3 keys that one had to hold so far and 256 more)"
    )


def test_buffers_that_a_rollback_enlarges_are_found() -> None:
    grows = fake("a rollback adds slots")
    for rolls in (program(Prefill(6), Rollback(2)), program(Prefill(3), Verify(3, 1))):
        finding, _ = judge(grows, rolls, MEMORY)
        assert finding is not None and finding.violation.step == 1 and "holds 4096 bytes after " in finding.message
    assert judge(grows, program(Prefill(300), Rollback(2)), MEMORY)[0] is None  # as if it had doubled


def test_what_one_sequence_needed_another_may_have_by_a_copy() -> None:
    """Buffers go with copies, and stay as large as they were behind a rollback."""
    copies = program(Prefill(700), Rollback(690), Fork(1), Snapshot(0), Reset(), Restore(0, 1), Chunk(2, 1), owners=TWO)
    assert judge(fake(), copies, MEMORY)[0] is None
    target = targets("qwen2_vl")[0]
    judge_program(target, copies, [properties.BY_ID[MEMORY]])


def test_growth_alone_proves_nothing() -> None:
    """Or a run without a trim would pass for one in which memory was given back."""
    assert decisive(fake(), program(Prefill(600), Rollback(2), Decode(3)), MEMORY) == 0


# --- what is left -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bug", "smallest", "message"),
    [
        ("what is reset stays", program(Prefill(3)), "holds 4096 bytes of keys and values when everybody has left"),
        ("overwritten snapshots stay", program(Prefill(3), Snapshot(2)), "before, it held 8192)"),
        ("reset keeps its memory", program(Prefill(3)), "(it held 0 when it was opened, 0 are of"),
    ],
    ids=["reset", "snapshot", "buffers"],
)
def test_what_is_kept_alive_is_found(bug: str, smallest: Program, message: str) -> None:
    finding, _ = judge(fake(bug), smallest, KEPT)
    assert finding is not None and (finding.property_id, finding.violation.step) == (KEPT, None)
    assert message in finding.message and "\n" not in finding.message
    assert judge(fake(), smallest, KEPT)[0] is None


def test_it_is_decisive_where_something_was_held() -> None:
    owned = ("pool", "model")
    assert decisive(fake(), program(Prefill(3), Snapshot(0), Fork(1), owners=TWO), KEPT) == 1
    assert decisive(fake(), program(Prefill(3), Reset()), KEPT) == 0
    assert decisive(fake(), program(Prefill(3), Snapshot(0), Reset()), KEPT) == 1
    assert decisive(fake(), program(Prefill(3, 1), owners=owned), KEPT) == 0  # the model may keep its own
    assert decisive(fake(), program(Prefill(3, 1), Prefill(3), owners=owned), KEPT) == 1


def test_what_the_model_owns_excuses_nothing_else() -> None:
    finding, _ = judge(fake("what is reset stays"), program(Prefill(3, 1), Prefill(3), owners=("pool", "model")), KEPT)
    assert finding is not None and "holds 8192 bytes" in finding.message
    assert "4096 are of sequences that the model owns" in finding.message


def test_a_run_that_stopped_is_not_judged() -> None:
    _, tally = judge(fake(fails_at=2), program(Prefill(3), Chunk(2)), KEPT)
    assert KEPT not in tally.properties


def test_an_engine_that_cannot_be_emptied_is_found() -> None:
    finding, _ = judge(fake("copies raise"), program(Prefill(3)), KEPT)
    assert finding is not None
    assert finding.message == "the engine could not be emptied: Reset() on sequence 0 raised RuntimeError: told to fail"


def test_an_engine_that_cannot_tell_is_found_and_a_misuse_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot(self: Any) -> int:
        raise OverflowError("too\nlarge")

    target = targets("qwen2_vl")[0]
    monkeypatch.setattr(ReferenceSession, "footprint", cannot)
    left = execute(target, program(Prefill(2))).emptied
    assert left == Emptied(error="telling its size raised OverflowError: too\nlarge")

    def misused(self: Any) -> int:
        raise NotImplementedError("no size")

    monkeypatch.setattr(ReferenceSession, "footprint", misused)
    with pytest.raises(NotImplementedError, match="no size"):
        _ = execute(target, program(Prefill(2))).emptied


def test_nothing_follows_the_end() -> None:
    run = Execution(fake(), TWO)
    run.apply(Prefill(3))
    assert run.emptied is run.emptied and run.emptied.before > run.emptied.after == 0
    with pytest.raises(RuntimeError, match="has stopped"):
        run.apply(Decode(1))


def test_a_cycle_is_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only the collector still knows of is gone: paged caches give their blocks back when they are collected."""
    target = next(each for each in targets("qwen2_vl") if each.storage == "paged-4")
    reset = ReferenceSession.reset

    def in_a_cycle(self: ReferenceSession, sequence: int) -> CopyObservation:
        knot: list[Any] = [[cache.copy() for cache in self._pool.forward_caches(sequence)]]
        knot.append(knot)
        return reset(self, sequence)

    monkeypatch.setattr(ReferenceSession, "reset", in_a_cycle)
    left = execute(target, program(Prefill(6))).emptied
    assert left.error is None and left.before > 0 == left.after


FULL = program(
    Prefill(9),
    Prefill(4, 1),
    Snapshot(0),
    Snapshot(3, 1),
    TrimFront(2),
    SaveLoad(),
    Fork(1),
    Chunk(2, 1),
    Rollback(1),
    Restore(0, 1),
    QuantizeCache("int8", 2),
    Prefill(5, 2),
    Batch((0, 1, 2)),  # without the last, where that stores its rows otherwise
    BatchDecode(2),
    owners=("pool", "pool", "pool", "model"),
)


def configurations() -> list[ReferenceTarget]:
    """One of each kind of caches."""
    found: dict[str, ReferenceTarget] = {}
    for family in ("qwen2_vl", "cohere2"):
        for target in targets(family):
            found.setdefault(target.storage, target)
    return list(found.values())


@pytest.mark.parametrize("target", configurations(), ids=lambda target: target.storage)
def test_every_kind_of_caches_gives_all_back(target: ReferenceTarget) -> None:
    """From the middle of a batch, beside snapshots, and what the model owns."""
    run = Execution(target, FULL.owners)
    for operation in (Prefill(3, 3), *FULL.operations):
        if not run.stopped and not (isinstance(operation, QuantizeCache) and target.row_storage != "rows"):
            run.apply(operation)
    assert not run.stopped and len(run.batch) >= 2
    left = run.emptied
    assert left.error is None and left.before > left.after == left.owned > 0


# --- planted ----------------------------------------------------------------------------------------------------------

SMALLEST = {
    "blocks-are-never-taken-back": program(Prefill(1)),
    "one-block-in-three-is-lost": program(Prefill(9)),
    "batch-that-was-left-stays": program(Prefill(1), Batch((0,)), BatchDecode(1)),
    "overwritten-snapshots-stay": program(Prefill(1), Snapshot(0)),
    "what-was-reset-stays": program(Prefill(1)),
    "rollback-adds-slots": program(Prefill(2), Rollback(1)),
    "first-token-takes-4096-slots": program(Prefill(1)),
}


@pytest.mark.parametrize("fault", OF_MEMORY, ids=lambda fault: fault.id)
def test_a_planted_bug_shows_in_a_small_program(fault: Any) -> None:
    target = next(each for each in targets("qwen2_vl") if fault.shown_on(each))
    judges = [properties.BY_ID[str(fault.breaks)]]
    judge_program(target, SMALLEST[fault.id], judges)
    with fault.plant(), pytest.raises(AssertionError, match="bytes"):
        judge_program(target, SMALLEST[fault.id], judges)


@pytest.mark.parametrize("target", configurations(), ids=lambda target: target.storage)
@pytest.mark.parametrize("name", ["buffers-double", "replaced-caches-stay-empty"])
def test_another_way_to_hold_memory_is_right(target: ReferenceTarget, name: str) -> None:
    variation = next(each for each in VARIATIONS if each.id == name)
    grows = program(Prefill(250), Decode(8), Fork(1), Chunk(300, 1), Snapshot(0), Restore(0, 1), owners=TWO)
    with variation.plant():
        judge_program(target, grows, [properties.BY_ID[name] for name in (MEMORY, KEPT)])


def test_the_planted_bugs_are_among_all() -> None:
    assert set(OF_MEMORY) <= set(FAULTS) and set(SMALLEST) == {fault.id for fault in OF_MEMORY}


def test_who_cannot_tell_is_not_asked() -> None:
    _, tally = judge(fake(lacks=frozenset({Capability.FOOTPRINT})), program(Prefill(3)), KEPT)
    assert KEPT not in tally.properties


def test_what_an_engine_holds_from_the_beginning_it_may_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant array in a pool is nobody's keys."""
    target = targets("qwen2_vl")[0]
    measured = ReferenceSession.footprint
    monkeypatch.setattr(ReferenceSession, "footprint", lambda self: measured(self) + 128)
    assert execute(target, program(Prefill(2))).emptied.allowed == 128
    judge_program(target, program(Prefill(2), Snapshot(0), Reset()), [properties.BY_ID[KEPT]])


@pytest.mark.parametrize("told", [-1, float("nan"), None, True], ids=["negative", "nan", "nothing", "bool"])
def test_a_size_that_is_none_is_found(monkeypatch: pytest.MonkeyPatch, told: object) -> None:
    target = targets("qwen2_vl")[0]
    monkeypatch.setattr(ReferenceSession, "footprint", lambda self: told)
    finding, _ = judge(target, program(Prefill(2)), KEPT)
    assert finding is not None and "is no number of bytes" in finding.message


def test_a_ring_may_be_there_as_a_whole_from_its_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mx.zeros of the whole window would be; one slot more than the window is reported."""
    target = next(each for each in targets("mistral4", far=True) if each.storage == "rotating-300-sinks-3")
    for slots, found in ((300, False), (301, True)):
        memory = ReferenceSession.memory

        def whole(self: Any, sequence: int, memory: Any = memory, slots: int = slots) -> tuple[CacheMemory, ...]:
            return tuple(CacheMemory(each.per_slot * slots, each.per_slot) for each in memory(self, sequence))

        with monkeypatch.context() as patch:
            patch.setattr(ReferenceSession, "memory", whole)
            assert (judge(target, program(Prefill(3)), MEMORY)[0] is not None) == found
