"""Verify rounds, snapshots, forks, files and resets: drawn, made smaller, counted, and given to targets that can."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness_on_copies import (
    FORK,
    MEMORY,
    NEVER,
    SAVED,
    SNAPSHOT,
    TOUR,
    TWO,
    fake,
    judge,
)

import properties
from harness.capability import CAPABILITY_OF, needs
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
    QuantizeCache,
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
    st.builds(QuantizeCache, st.sampled_from(("int8", "int8", "affine8")), sequence_of()),
)


@settings(max_examples=200, deadline=None)
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
    run_campaign("lacking", [target], (), Profile("p", 120, 8, shrink=False), 3, also=Watch())
    assert drawn == {kind for kind in OPERATIONS if CAPABILITY_OF.get(kind) != lacking}


def test_one_sequence_and_one_owner_where_the_target_has_no_more() -> None:
    from harness.campaign import run_campaign
    from harness.profiles import Profile

    lacks = frozenset({Capability.SEQUENCES, Capability.OWNERSHIP})
    result = run_campaign("one", [fake(lacks=lacks)], (), Profile("p", 40, 6, shrink=False), 3)
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
