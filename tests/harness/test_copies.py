"""Verify rounds, snapshots, forks, files and resets: what they mean in the ledger, in a run and to the judges."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness_fake_target import FakeTarget

import properties
from harness.capability import CAPABILITY_OF, needs
from harness.execution import Execution, execute
from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.ledger import PoolLedger
from harness.operations import (
    OPERATIONS,
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
)
from harness.reduction import _candidates, _normal, reduce_finding
from harness.replay import replay
from harness.tally import Tally
from harness.target import Capability
from harness.trace import Trace, TraceError

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


# --- random programs --------------------------------------------------------------------------------------------------


def sequence_of() -> st.SearchStrategy[int]:
    return st.integers(0, 1)


_ANY: st.SearchStrategy[Operation] = st.one_of(
    st.builds(Chunk, st.integers(1, 4), sequence_of()),
    st.builds(Decode, st.integers(1, 3), sequence_of()),
    st.builds(TrimFront, st.integers(0, 5), st.integers(0, 3), sequence_of()),
    st.builds(Rollback, st.integers(0, 4), sequence_of()),
    st.builds(EnforceMaxKvSize, st.integers(1, 9), st.sampled_from(("trim", "sinks", "shift")), sequence=sequence_of()),
    st.integers(1, 4).flatmap(lambda k: st.builds(Verify, st.just(k), st.integers(0, k), sequence_of())),
    st.builds(Snapshot, st.integers(0, 1), sequence_of()),
    st.builds(Restore, st.integers(0, 1), sequence_of()),
    sequence_of().map(lambda s: Fork(1 - s, s)),
    st.builds(SaveLoad, sequence_of()),
    st.builds(Reset, sequence_of()),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(_ANY, max_size=16), st.sampled_from((TWO, ("pool", "model"), ("model", "pool"))))
def test_a_right_target_is_never_reported(operations: list[Operation], owners: Any) -> None:
    """Whatever the order: the fake keeps its rows in another way than the ledger, and no property may complain."""
    program = Program((Prefill(3), *operations), owners)
    assert Program.from_json(program.to_json()) == program
    assert judge(fake(), program)[0] is None


@settings(max_examples=100, deadline=None)
@given(st.lists(_ANY, min_size=1, max_size=10), st.sampled_from((TWO, ("pool", "model"))))
def test_whatever_the_reduction_proposes_is_a_program_or_refused(operations: list[Operation], owners: Any) -> None:
    """A part of a program may mean nothing, a Fork into a sequence that is gone; that must never end the reduction."""
    for drawn, left in _candidates(fake(), Program((Prefill(3), *operations), owners)):
        try:
            program = _normal(drawn, left)
        except OperationError:
            continue
        assert all(op.index < len(program.owners) for op in program.operations)


REDUCED = [
    ("snapshot shares its rows", SNAPSHOT, "Snapshot(0) ; Prefill(1) ; Restore(0)"),
    ("restore keeps the offset", SNAPSHOT, "Snapshot(0) ; Prefill(1) ; Restore(0)"),
    ("fork shares its rows", FORK, "s0:Fork(into=1) ; s1:Prefill(1)   [s0 pool-owned, s1 pool-owned]"),
    ("forgets live_start in a file", SAVED, "Prefill(1) ; TrimFront(1) ; SaveLoad()"),
    ("reset keeps its memory", MEMORY, "Prefill(1) ; Reset()"),
    ("a rollback leaves one", NEVER, "Verify(1, accept=0) ; Decode(1)"),
]


@pytest.mark.parametrize(("bug", "name", "text"), REDUCED)
def test_a_long_program_becomes_what_a_person_would_write(bug: str, name: str, text: str) -> None:
    finding, _ = judge(fake(bug), TOUR, name)
    assert finding is not None
    smaller, again = reduce_finding(fake(bug), finding, properties.ALL)
    assert again and str(smaller.program) == text


# --- what a target can do ---------------------------------------------------------------------------------------------


def test_a_program_says_what_it_needs() -> None:
    assert needs(Program((Prefill(3), Chunk(2), Decode(1)))) == frozenset()
    assert needs(TOUR) == {
        *(Capability.FRONT_TRIM, Capability.ROLLBACK, Capability.SEQUENCES),
        *(Capability.SNAPSHOT, Capability.FORK, Capability.SAVE_LOAD, Capability.RESET),
    }
    assert needs(Program((Prefill(1),), ("model",))) == {Capability.OWNERSHIP}
    assert {kind for kind in OPERATIONS if kind not in CAPABILITY_OF} == {Prefill, Chunk, Decode}


@pytest.mark.parametrize("lacking", sorted(set(CAPABILITY_OF.values())))
def test_the_machine_draws_only_what_the_target_can_do(lacking: Capability) -> None:
    from harness.campaign import run_campaign
    from harness.profiles import Profile

    class Watch(Tally):
        def on_end(self, evidence: Any) -> None:
            assert lacking not in needs(evidence.run.program)
            drawn.update(type(step.operation) for step in evidence.run.steps)

    drawn: set[type[Operation]] = set()
    target = fake(lacks=frozenset({lacking}))
    run_campaign("lacking", [target], properties.ALL, Profile("p", 120, 8, shrink=False), 3, also=Watch())
    assert drawn == {kind for kind in OPERATIONS if CAPABILITY_OF.get(kind) != lacking}


def test_one_sequence_and_one_owner_where_the_target_has_no_more() -> None:
    from harness.campaign import run_campaign
    from harness.profiles import Profile

    lacks = frozenset({Capability.SEQUENCES, Capability.OWNERSHIP})
    result = run_campaign("one", [fake(lacks=lacks)], properties.ALL, Profile("p", 40, 6, shrink=False), 3)
    cover = result.tally.coverage
    assert cover.programs >= 40 and cover.several_sequences == cover.model_owned == 0


def test_a_trace_that_the_target_cannot_run_is_refused() -> None:
    trace = Trace({}, TOUR, None, (), {})
    with pytest.raises(TraceError, match="cannot run its program, it lacks: forks of a sequence"):
        replay(trace, fake(lacks=frozenset({Capability.FORK})), properties.ALL)


# --- coverage ---------------------------------------------------------------------------------------------------------

_CUT = (Prefill(4), TrimFront(1))


@pytest.mark.parametrize(
    ("state", "reached", "missed"),
    [
        ("verified_in_part", (Prefill(2), Verify(3, 1)), (Prefill(2), Verify(3, 0), Verify(3, 3))),
        (
            "restored_after_trim",
            (Prefill(4), Snapshot(0), TrimFront(1), Restore(0)),
            (Prefill(4), Snapshot(0), Chunk(1), Restore(0)),
        ),
        ("restored_after_trim", (*_CUT, Snapshot(0), Restore(0)), (*_CUT, Restore(0))),
        ("forked_and_used_both", (Prefill(2), Fork(1), Chunk(1), Chunk(1, 1)), (Prefill(2), Fork(1), Chunk(1))),
        (
            "forked_and_used_both",
            (Prefill(2), Fork(1), Chunk(1), Chunk(1, 1)),
            (Prefill(2), Fork(1), Reset(1), Chunk(1), Prefill(1, 1)),
        ),
        ("saved_after_trim", (*_CUT, SaveLoad()), (Prefill(4), SaveLoad(), TrimFront(1))),
        ("saved_after_trim", (*_CUT, SaveLoad()), (*_CUT, TrimFront(9), SaveLoad())),
        ("reset_and_reused", (Prefill(2), Reset(), Prefill(1)), (Prefill(2), Reset())),
        ("reset_and_reused", (Prefill(2), Reset(), Prefill(1)), (Reset(), Prefill(1))),
        ("rolled_back", (Prefill(2), Rollback(1)), (Prefill(2), Verify(2, 1))),  # a verify round has its own count
    ],
)
def test_states_are_counted(state: str, reached: tuple[Operation, ...], missed: tuple[Operation, ...]) -> None:
    for operations, expected in ((reached, 1), (missed, 0)):
        _, tally = judge(fake(), Program(operations, TWO))
        assert tally.coverage.to_json()[state] == expected
