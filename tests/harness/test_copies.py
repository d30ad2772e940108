"""Verify rounds, snapshots, forks, files and resets: what they mean in the ledger, in a run and to the judges."""

from __future__ import annotations

import pytest
from kv_harness_on_copies import (
    COMPLETES,
    FORK,
    ISOLATED,
    LENGTHS,
    MEMORY,
    NEVER,
    ONE_SHOT,
    SAVED,
    SNAPSHOT,
    TOUR,
    TWO,
    decisive,
    fake,
    judge,
    tokens,
)

from harness.execution import execute
from harness.ledger import PoolLedger
from harness.operations import (
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)

# --- the ledger -------------------------------------------------------------------------------------------------------


def test_a_snapshot_brings_everything_back_and_again() -> None:
    pool = PoolLedger(("pool",))
    pool.sequences[0].append(6)
    pool.sequences[0].trim_front(2, 1)
    assert pool.apply(Snapshot(0))
    taken = pool.sequences[0].state()
    for _ in range(2):
        pool.sequences[0].append(3)
        pool.sequences[0].trim_front(4)
        pool.sequences[0].rollback(2)
        assert pool.apply(Restore(0))
        assert (pool.sequences[0].state(), pool.sequences[0].held) == (taken, [0, 3, 4, 5])


def test_an_empty_slot_gives_nothing_back() -> None:
    pool = PoolLedger(("pool",))
    pool.sequences[0].append(2)
    assert not pool.apply(Restore(1))
    assert pool.sequences[0].held == [0, 1]


def test_what_the_model_owns_is_neither_copied_nor_reset() -> None:
    pool = PoolLedger(("model", "pool"))
    pool.sequences[0].append(3)
    for operation in (Snapshot(0), Restore(0), Fork(1), SaveLoad(), Reset(), Fork(0, 1)):
        assert not pool.apply(operation)
    assert (pool.sequences[0].held, pool.sequences[1].held, pool.slots) == ([0, 1, 2], [], {})


def test_forks_share_no_list_and_a_reset_starts_from_nothing() -> None:
    pool = PoolLedger(TWO)
    pool.sequences[0].append(4)
    assert pool.apply(Fork(1)) and pool.sequences[1].held == [0, 1, 2, 3] and pool.sequences[1].begun
    pool.sequences[1].append(1)
    pool.sequences[0].trim_front(2)
    assert (pool.sequences[0].held, pool.sequences[1].held) == ([2, 3], [0, 1, 2, 3, 4])
    assert not pool.sequences[1].trimmed
    assert pool.apply(Reset()) and pool.sequences[0] == PoolLedger(("pool",)).sequences[0]


# --- a run ------------------------------------------------------------------------------------------------------------


def test_a_step_says_what_was_copied_and_into_which_sequence() -> None:
    run = execute(fake(), TOUR)
    assert not run.stopped
    found = {step.index: (step.effective, step.replaced) for step in run.steps if step.copied is not None}
    assert found == {1: (True, None), 4: (True, 0), 6: (True, 1), 12: (True, None), 14: (True, 0)}
    assert all(step.copied.caches == 2 for step in run.steps if step.copied is not None)
    restored, forked, reset = run.steps[4], run.steps[6], run.steps[14]
    assert restored.after == run.steps[1].after and restored.told[0].held == tuple(range(6))
    assert forked.told[0].held == forked.told[1].held == tuple(range(8))
    assert (reset.after.offset, reset.told[0].held, reset.told[0].memory[0].held) == (0, (), 0)


def test_a_verify_round_is_a_forward_and_a_rollback() -> None:
    run = execute(fake(), Program((Prefill(4), Verify(5, 2), Verify(3, 3), Verify(2, 0), Chunk(2))))
    first, all_of_them, none, after = run.steps[1:]
    assert len(first.forwards[0].append.positions) == 5 and first.after.offset == 6
    assert first.expected_removed == 3 and first.removal is not None and first.removal.removed == (3, 3)
    assert all_of_them.removal is None and all_of_them.expected_removed is None and all_of_them.after.offset == 9
    assert none.expected_removed == 2 and none.after.offset == 9
    assert after.forwards[0].append.positions == range(9, 11)


def test_no_state_gets_the_same_tokens_again() -> None:
    """Behind a restore, a fork or a reset other tokens stand at the same positions, so stale rows cannot pass."""
    program = Program(
        (Prefill(4), Snapshot(0), Chunk(3), Restore(0), Chunk(3), Fork(1), Chunk(3), Chunk(3, 1), Reset(), Prefill(4)),
        TWO,
    )
    run = execute(fake(vocab_size=100_000), program)
    given = [tokens(run, step) for step in (2, 4, 6, 7)]
    assert len(set(given)) == 4 and all(len(each) == 3 for each in given)
    assert tokens(run, 9) != tokens(run, 0)


@pytest.mark.parametrize("operation", [Snapshot(0), Restore(0), Fork(1), SaveLoad(), Reset()])
def test_an_error_of_a_copy_stops_the_run_and_is_found(operation: Operation) -> None:
    finding, _ = judge(fake("copies raise"), Program((Prefill(3), operation, Chunk(2)), TWO), COMPLETES)
    assert finding is not None and finding.violation.step == 1
    assert f"{operation.text()} raised RuntimeError: told to fail (offset 3" in finding.message


def test_a_copy_of_what_the_model_owns_is_found() -> None:
    program = Program((Prefill(3), Snapshot(0), Chunk(2, 1), Restore(0, 1)), ("model", "pool"))
    finding, _ = judge(fake("copies what the model owns"), program, LENGTHS)
    assert finding is not None and finding.violation.step == 3


# --- the judges -------------------------------------------------------------------------------------------------------

CAUGHT = [
    (
        SNAPSHOT,
        "snapshot shares its rows",
        4,
        "unlike at the Snapshot of step 1, layer 1: offset 6, live_start 0, live_len 6 became offset 6, live_start 1, ",
    ),
    (SNAPSHOT, "restore keeps the offset", 4, "live_len 6 became offset 9, live_start 3, live_len 6"),
    (FORK, "fork shares its rows", 7, "Chunk(2) on sequence 1 changed sequence 0, with which it shares a past: "),
    (
        FORK,
        "fork leaves out a row",
        6,
        "in the fork, unlike in its source, layer 1: the key row in slot 0 (position",
    ),
    (ISOLATED, "neighbour trimmed too", 11, "TrimFront(2, keep=1) on sequence 0 changed sequence 1: layer 1: offset"),
    (
        SAVED,
        "forgets live_start in a file",
        12,
        "SaveLoad() on sequence 0: layer 1: offset 12, live_start 2, live_",
    ),
    (SAVED, "slots grow in a file", 12, "layer 1: a slot of 8 bytes became one of 16"),
    (LENGTHS, "reset keeps the offset", 14, "the ledger says offset 0, live_start 0, live_len 0"),
    (MEMORY, "reset keeps its memory", 14, "holds 2048 bytes after Reset(), allowed are 0 (a reset leaves nothing"),
    (NEVER, "a rollback leaves one", 10, "Decode(1), forward 0: the logits of the token at position 11 are "),
    (ONE_SHOT, "the cut matters", 0, "Prefill(6): the logits of the token at position 0 are "),
]


@pytest.mark.parametrize(("name", "bug", "step", "message"), CAUGHT, ids=[bug for _, bug, _, _ in CAUGHT])
def test_a_bug_that_the_property_must_catch(name: str, bug: str, step: int, message: str) -> None:
    finding, _ = judge(fake(bug), TOUR, name)
    assert finding is not None and (finding.property_id, finding.violation.step) == (name, step)
    assert message in finding.message and "\n" not in finding.message


def test_a_fork_that_leaves_out_a_row_is_seen_whichever_side() -> None:
    """The copy is compared with its source, and the source with what it was."""
    source = Program((Prefill(4), Fork(1)), TWO)
    assert judge(fake("fork leaves out a row"), source, FORK)[0] is not None
    assert judge(fake(), source, FORK)[0] is None


def test_a_trim_that_keeps_its_memory_is_found_where_that_is_more_than_a_growth() -> None:
    small, large = Program((Prefill(200), TrimFront(190))), Program((Prefill(600), TrimFront(500)))
    keeps = fake("trims keep their memory")
    assert judge(keeps, small, MEMORY)[0] is None and decisive(fake(), small, MEMORY) == 0
    finding, _ = judge(keeps, large, MEMORY)
    assert finding is not None and "holds 6144 bytes after TrimFront(500), allowed are 2848" in finding.message
    assert decisive(fake(), large, MEMORY) == 1


def test_on_a_right_target_nothing_is_found_and_the_new_properties_are_decisive() -> None:
    finding, tally = judge(fake(), TOUR)
    assert finding is None
    new = (SNAPSHOT, FORK, ISOLATED, SAVED, MEMORY, NEVER, ONE_SHOT)
    assert [name for name in new if not tally.properties[name].decisive_steps] == []


VACUOUS = [
    (SNAPSHOT, Program((Prefill(3), Restore(0)))),  # nothing in the slot
    (SNAPSHOT, Program((Prefill(3), Snapshot(0), Restore(0)))),  # nothing happened in between
    (SNAPSHOT, Program((Prefill(3), Snapshot(0), Chunk(2), Restore(0)), ("model",))),
    (FORK, Program((Prefill(3), Prefill(3, 1), Chunk(2)), TWO)),  # no common past
    (FORK, Program((Fork(1), Snapshot(0)), TWO)),  # nothing to fork
    (FORK, Program((Prefill(3), Fork(1)), ("pool", "model"))),
    (ISOLATED, Program((Prefill(3), Chunk(2), TrimFront(1)), TWO)),  # the other holds nothing
    (ISOLATED, Program((Prefill(3), Chunk(2)))),
    (SAVED, Program((SaveLoad(),))),
    (SAVED, Program((Prefill(3), SaveLoad()), ("model",))),
    (MEMORY, Program((Reset(),))),
    (MEMORY, Program((Prefill(3), TrimFront(1)))),  # what it held is what it may hold
    (NEVER, Program((Prefill(3), Rollback(1)))),  # nothing follows
    (NEVER, Program((Prefill(3), Verify(3, 3), Chunk(2)))),  # nothing was rejected
    (NEVER, Program((Prefill(3), Snapshot(0), Rollback(1), Chunk(2)))),  # another state holds the rejected token
    (NEVER, Program((Prefill(3), Rollback(1), Reset(), Prefill(2)))),
    (NEVER, Program((Prefill(8), TrimFront(4, 2), Rollback(5), Chunk(2)))),  # into the sinks
    (NEVER, Program((Prefill(3), Verify(3, 1), Chunk(2)), ("model",))),
    (ONE_SHOT, Program((Prefill(3),))),  # one forward already
    (ONE_SHOT, Program((Prefill(3), TrimFront(1), Chunk(2)))),
]


@pytest.mark.parametrize(("name", "program"), VACUOUS, ids=str)
def test_what_proves_nothing_is_not_decisive(name: str, program: Program) -> None:
    assert decisive(fake(), program, name) == 0


@pytest.mark.parametrize(
    ("name", "program"),
    [
        (SNAPSHOT, Program((Prefill(3), Snapshot(0), Rollback(1), Restore(0)))),
        (SNAPSHOT, Program((Prefill(3), Snapshot(0), Rollback(2), Chunk(2), Restore(0)))),  # the same lengths
        (SNAPSHOT, Program((Prefill(3), Snapshot(2), Restore(2, 1)), TWO)),  # into another sequence
        (FORK, Program((Prefill(3), Fork(1)), TWO)),
        (ISOLATED, Program((Prefill(3), Prefill(2, 1)), TWO)),
        (SAVED, Program((Prefill(1), SaveLoad()))),
        (MEMORY, Program((Prefill(1), Reset()))),
        (NEVER, Program((Prefill(3), Rollback(1), Decode(1)))),
        (NEVER, Program((Verify(2, 0), Decode(1)))),
        (NEVER, Program((Prefill(3), Verify(3, 1), Snapshot(0), Reset(), Restore(0), Chunk(2)))),
        (NEVER, Program((Prefill(3), Verify(3, 1), Fork(1), Chunk(2, 1)), TWO)),
        (NEVER, Program((Prefill(9), Verify(3, 1), EnforceMaxKvSize(4, "sinks"), Chunk(2)))),
        (ONE_SHOT, Program((Prefill(3), Decode(1)))),
        (ONE_SHOT, Program((Prefill(3), TrimFront(1), Reset(), Prefill(2), Chunk(2)))),
        (ONE_SHOT, Program((Prefill(3), Snapshot(0), TrimFront(1), Restore(0), Chunk(2)))),
    ],
    ids=str,
)
def test_the_smallest_decisive_programs(name: str, program: Program) -> None:
    assert decisive(fake(), program, name) >= 1


def test_a_target_that_does_not_repeat_itself_makes_the_retellings_inconclusive() -> None:
    for name in (NEVER, ONE_SHOT):
        finding, tally = judge(fake("noise"), TOUR, name)
        assert finding is None
        assert (tally.properties[name].inconclusive, tally.properties[name].decisive_steps) == (1, 0)


def test_an_error_in_a_retelling_is_found() -> None:
    """The run of a program completes; the fake fails at its third forward, which only a run one by one has."""
    program = Program((Prefill(3), Chunk(2)))
    assert judge(fake(fails_at=3), program, COMPLETES)[0] is None
    finding, _ = judge(fake(fails_at=3), program, ONE_SHOT)
    assert finding is not None and "in forwards of 1 token it raised RuntimeError: told to fail" in finding.message


def test_comparison_forwards_are_counted() -> None:
    _, tally = judge(fake(), Program((Prefill(3), Chunk(2))), ONE_SHOT)
    assert tally.forwards_made == 2 + 1 + 5  # the run, all at once, one by one
