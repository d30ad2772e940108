"""Batches: what the judges find in them, and what becomes of a program that has some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness_fake_target import FakeTarget
from kv_harness_on_fakes import (
    BATCHED,
    COMPLETES,
    CONTENT,
    KEEP,
    LENGTHS,
    POSITIONS,
    ROWS,
    SOLO,
    THREE,
    TWO,
    campaign,
    fake,
    judge,
    quirky,
    wide,
)

import properties
from harness.execution import Execution, execute
from harness.findings import Verdict
from harness.lives import lives
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
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
from harness.profiles import Profile
from harness.recording import record
from harness.reduction import _candidates, _normal, reduce_finding
from harness.replay import Outcome, replay
from harness.retelling import untrimmed, without_batches, without_rejected
from harness.steps import AS_KV_HEADS
from harness.target import Capability
from harness.trace import read_trace

# --- the judges -------------------------------------------------------------------------------------------------------

CAUGHT = [
    (CONTENT, "padding is shown", 3, "the mask shows the padding in slot 0 to the token at position 3"),
    (
        CONTENT,
        "padding is shown to one token",
        4,
        "attention (no mask) shows the padding in slot 0 to the token at",
    ),
    (CONTENT, "the first row's mask for all", 3, "shows the padding in slot 0"),
    (POSITIONS, "positions of the longest row", 3, "token 0 of the chunk stands at position 3, it was given 6"),
    (LENGTHS, "right padding is kept", 3, "the cache of sequence 0 says offset 10"),
    (LENGTHS, "a key of the batch is missing", 3, "slots of padding in a batch of 2"),
    (LENGTHS, "a trim reaches the whole batch", 5, "the cache of sequence 0 says offset 10, live_start 3, live_len 7"),
    (LENGTHS, "who leaves stands at its live length", 14, "the cache of sequence 1 says"),
    (KEEP, "who joins loses its newest key", 2, "Batch(0, 1) changed sequence 0: layer 1: the key row in slot 5"),
    (KEEP, "who stays gets another's keys when one leaves", 8, "Batch(1, 2) changed sequence 1: layer 1: the key row"),
    (SOLO, "rows mix in a batch", 3, "BatchForward(2, 4), sequence 1 in a batch of 2: the logits of the token at po"),
    (SOLO, "padding is shown", 3, "of the same sequence by itself"),
    (COMPLETES, "a ragged batch raises", 3, "BatchForward(2, 4) raised ValueError: ragged"),
    (COMPLETES, "joining raises", 8, "Batch(1, 2) raised RuntimeError: told to fail"),
]


@pytest.mark.parametrize(("name", "bug", "step", "message"), CAUGHT, ids=[f"{bug}-{name}" for name, bug, *_ in CAUGHT])
def test_a_bug_that_the_property_must_catch(name: str, bug: str, step: int, message: str) -> None:
    finding = judge(wide(bug), BATCHED, name).finding
    assert finding is not None and (finding.property_id, finding.violation.step) == (name, step), finding
    assert message in finding.message and "\n" not in finding.message


def test_what_leaves_with_another_operation_is_judged_as_leaving() -> None:
    program = Program((Prefill(3), Prefill(2, 1), Batch((0, 1)), Chunk(1, 1)), TWO)
    finding = judge(wide("who stays gets another's keys when one leaves"), program, KEEP).finding
    assert finding is not None and finding.violation.step == 3
    assert finding.message.startswith("Chunk(1) on sequence 1, out of the batch, changed sequence 0: layer 1: the key")


@pytest.mark.parametrize(
    "target",
    [
        fake(),
        fake(mask="additive"),
        fake(windows=(None, 3)),
        fake(attention_layers=(0,)),
        quirky("a mask for every head"),
        quirky("mask for one token"),
        quirky("right padding is hidden by causality alone"),
        quirky("right padding stands nowhere"),
        quirky("encoder call"),
        quirky("a table instead of positions"),
        quirky("a table beside the positions"),
        quirky("a single number as position"),
        quirky("attention by hand", mask="additive"),
        quirky("experts nearly tie"),
        fake(policy="offset", lacks=frozenset({Capability.FRONT_TRIM, Capability.ENFORCE})),
    ],
)
def test_a_harmless_variation_is_not_reported(target: FakeTarget) -> None:
    program = BATCHED
    if Capability.FRONT_TRIM not in target.capabilities:
        program = Program(tuple(op for op in program.operations if not isinstance(op, TrimFront)), program.owners)
    assert judge(target, program).finding is None


PROVES = [
    (KEEP, (Prefill(1), Batch((0,)))),
    (KEEP, (Prefill(1), Prefill(1, 1), Batch((0, 1)), Batch((1,)))),
    (KEEP, (Prefill(1), Batch((0, 1)), Chunk(1, 1))),  # who stays is judged when the other goes
    (SOLO, (Batch((0, 1)), BatchForward((1,)))),
    (SOLO, (Prefill(1), Batch((0, 1)), BatchDecode(1))),
    (LENGTHS, (Prefill(2), Batch((0, 1)), TrimFront(1))),
    (ROWS, (Prefill(2), Batch((0, 1)), Rollback(1))),
]
PROVES_NOTHING = [
    (KEEP, (Batch((0, 1)),)),  # nobody holds anything
    (KEEP, (Prefill(1), Batch((0, 1)), Batch((0, 1)))[2:]),
    (KEEP, (Prefill(1), Chunk(2))),
    (KEEP, (Prefill(1), Batch(()))),
    (KEEP, (Batch((0, 1)), Prefill(2, 1))),  # who stays holds nothing
    (SOLO, (Batch((0,)), BatchForward((2,)), BatchDecode(2))),  # a batch of one
    (SOLO, (Batch((0, 1)), Batch((0,)), BatchForward((2,)))),
    (SOLO, (BatchForward((2,)),)),
    (SOLO, (Prefill(2), Prefill(2, 1))),
]


@pytest.mark.parametrize(("name", "operations"), PROVES, ids=str)
def test_the_smallest_decisive_programs(name: str, operations: tuple[Operation, ...]) -> None:
    assert judge(wide(), Program(operations, TWO), name).decisive(name) >= 1


@pytest.mark.parametrize(("name", "operations"), PROVES_NOTHING, ids=str)
def test_what_proves_nothing_is_not_decisive(name: str, operations: tuple[Operation, ...]) -> None:
    outcome = judge(wide(), Program(operations, TWO), name)
    assert outcome.finding is None and outcome.decisive(name) == 0


def test_a_target_that_does_not_repeat_itself_makes_the_comparison_inconclusive() -> None:
    outcome = judge(wide("noise"), BATCHED, SOLO)
    assert outcome.finding is None
    counted = outcome.tally.properties[SOLO]
    assert (counted.inconclusive, counted.decisive_steps) == (1, 0)


# --- told again -------------------------------------------------------------------------------------------------------


def lines(run: Execution) -> list[str]:
    return [f"s{line.operation.index}:{line.operation.text()}" for line in without_batches(run.steps)]


def test_the_same_run_with_every_sequence_by_itself() -> None:
    run = execute(wide(), BATCHED)
    assert lines(run)[:10] == [
        *("s0:Prefill(6)", "s1:Prefill(3)", "s0:Chunk(2)", "s1:Chunk(4)", "s0:Chunk(1)", "s1:Chunk(1)"),
        *("s0:Chunk(1)", "s1:Chunk(1)", "s1:TrimFront(3)", "s1:Rollback(2)"),
    ]
    assert not any("Batch" in text for text in lines(run))


def test_without_rejected_drafts_rows_keep_their_tokens() -> None:
    """A row that is rolled back loses its own tokens alone, and what follows has the tokens that it had."""
    program = Program((Prefill(3), Batch((0, 1)), BatchForward((4, 2)), Rollback(2), BatchForward((1, 3))), TWO)
    run = execute(wide(), program)
    told = without_rejected(run.owners, run.steps)
    assert [(line.operation.index, line.tokens) for line in told] == [(0, 3), (0, 2), (1, 2), (0, 1), (1, 3)]
    assert [line.behind for line in told] == [False, False, False, True, False]
    numbers = [line.numbered[1][line.operation.index] for line in told]
    assert numbers == [0, 3, 0, 7, 2]


def test_untrimmed_leaves_out_what_a_trimmed_row_touched() -> None:
    operations = (
        *(Prefill(3), Prefill(3, 1), Prefill(3, 2), Batch((0, 1)), BatchForward((1,)), TrimFront(1, 0, 1)),
        *(BatchForward((1,)), Chunk(1), Chunk(1, 2)),
    )
    run = execute(wide(), Program(operations, THREE))
    assert untrimmed(run.steps) == [0, 1, 2, 3, 4, 8]  # sequence 0 went forward beside a trimmed one


def test_a_life_goes_on_in_a_batch() -> None:
    run = execute(wide(), Program((Prefill(3), Batch((0, 1)), BatchForward((2, 1)), Chunk(1), BatchDecode(1)), TWO))
    one, two = lives(run.owners, run.steps)
    assert (one.sequence, one.forwards, len(one.tokens)) == (0, 3, 6)
    assert (two.sequence, two.forwards, len(two.tokens)) == (1, 2, 2)


# --- made smaller -----------------------------------------------------------------------------------------------------

REDUCED = [
    ("padding is shown", CONTENT, "s0:Prefill(1) ; Batch(0, 1) ; BatchDecode(1)"),
    ("padding is shown to one token", CONTENT, "s0:Prefill(1) ; Batch(0, 1) ; BatchDecode(1)"),
    ("positions of the longest row", POSITIONS, "s0:Prefill(1) ; Batch(0, 1) ; BatchDecode(1)"),
    ("right padding is kept", LENGTHS, "Batch(0, 1) ; BatchForward(1, 2)"),
    ("a trim reaches the whole batch", LENGTHS, "s0:Prefill(1) ; Batch(0, 1) ; s1:TrimFront(1)"),
    ("who joins loses its newest key", KEEP, "Prefill(1) ; Batch(0)"),
    ("rows mix in a batch", SOLO, "Batch(0, 1) ; BatchDecode(1)"),
    ("joining raises", COMPLETES, "Batch(0) ; Batch(1)"),
]


@pytest.mark.parametrize(("bug", "name", "text"), REDUCED)
def test_a_long_program_becomes_what_a_person_would_write(bug: str, name: str, text: str) -> None:
    finding = judge(wide(bug), BATCHED, name).finding
    assert finding is not None
    smaller, again = reduce_finding(wide(bug), finding, properties.ALL)
    assert again and len(smaller.program.operations) <= len(text.split(";"))
    assert str(smaller.program).split("   ")[0] == text


def test_what_needs_no_batch_ends_without_one() -> None:
    finding = judge(wide("reports zero removed"), BATCHED, "trim_reports_what_it_removed").finding
    assert finding is not None
    smaller, again = reduce_finding(wide("reports zero removed"), finding, properties.ALL)
    assert again and str(smaller.program) == "Prefill(1) ; TrimFront(1)"


ANY: st.SearchStrategy[Operation] = st.one_of(
    st.permutations(range(3)).flatmap(lambda rows: st.integers(0, 3).map(lambda count: Batch(tuple(rows[:count])))),
    st.lists(st.integers(1, 5), min_size=1, max_size=3).map(lambda tokens: BatchForward(tuple(tokens))),
    st.builds(BatchDecode, st.integers(1, 3)),
    st.builds(Chunk, st.integers(1, 4), st.integers(0, 2)),
    st.builds(TrimFront, st.integers(0, 6), st.integers(0, 3), st.integers(0, 2)),
    st.builds(Rollback, st.integers(0, 5), st.integers(0, 2)),
    st.builds(EnforceMaxKvSize, st.integers(1, 9), st.sampled_from(("trim", "sinks", "shift")), sequence=st.just(1)),
    st.builds(Verify, st.just(3), st.integers(0, 3), st.integers(0, 2)),
    st.builds(Snapshot, st.just(0), st.integers(0, 2)),
    st.builds(Restore, st.just(0), st.integers(0, 2)),
    st.integers(0, 2).map(lambda s: Fork((s + 1) % 3, s)),
    st.builds(SaveLoad, st.integers(0, 2)),
    st.builds(Reset, st.integers(0, 2)),
)
LAYOUTS = (THREE, ("pool", "model", "pool"), ("model", "model", "pool"))


@settings(max_examples=250, deadline=None)
@given(st.lists(ANY, max_size=16), st.sampled_from(LAYOUTS), st.sampled_from(((), (None, 3))))
def test_a_right_target_is_never_reported(operations: list[Operation], owners: Any, windows: Any) -> None:
    program = Program((Prefill(3), Batch((0, 1, 2)), *operations), owners)
    assert Program.from_json(program.to_json()) == program
    outcome = judge(wide(windows=windows), program)
    assert outcome.finding is None, outcome.finding


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY, min_size=1, max_size=8), st.sampled_from(LAYOUTS))
def test_whatever_the_reduction_proposes_is_a_program_or_refused(operations: list[Operation], owners: Any) -> None:
    for drawn, left in _candidates(wide(), Program((Prefill(3), Batch((0, 1, 2)), *operations), owners)):
        try:
            program = _normal(drawn, left)
        except OperationError:
            continue
        assert Program.from_json(program.to_json()) == program


# --- traces, targets without batches, coverage ------------------------------------------------------------------------


def test_a_trace_with_batches_replays(tmp_path: Path) -> None:
    bug = "padding is shown"
    finding = judge(wide(bug), BATCHED, CONTENT).finding
    assert finding is not None
    trace = record(execute(wide(bug), finding.program), finding, {})
    path = tmp_path / "trace.json"
    path.write_text(trace.to_text())
    again = read_trace(path)
    assert again.program == finding.program
    assert replay(again, wide(bug), properties.ALL).same
    assert replay(again, wide(), properties.ALL).outcome is Outcome.FIXED


def test_a_target_without_batches_is_given_none_and_the_properties_do_not_apply() -> None:
    lacking = fake(lacks=frozenset({Capability.BATCH}))
    result = campaign(lacking, profile=Profile("p", 40, 8, shrink=False))
    cover = result.tally.coverage
    assert cover.batched == cover.left_a_batch == 0 and cover.several_sequences > 0
    found = {one.id for one in result.properties if one.verdict is Verdict.NOT_APPLICABLE}
    assert found == {KEEP, SOLO}


@pytest.mark.parametrize(
    ("state", "reached", "missed"),
    [
        ("batched", (Batch((0, 1)), BatchForward((1,))), (Batch((0,)), BatchForward((1,)))),
        ("batched_with_padding", (Batch((0, 1)), BatchForward((1, 2))), (Batch((0, 1)), BatchForward((2,)))),
        (
            "batched_with_padding",
            (Prefill(1), Batch((0, 1)), BatchDecode(1)),
            (Prefill(1), Prefill(1, 1), Batch((0, 1)), BatchDecode(1)),
        ),
        (
            "batched_after_trim",
            (Prefill(2), TrimFront(1), Batch((0, 1)), BatchDecode(1)),
            (Prefill(2), Batch((0, 1)), BatchDecode(1), TrimFront(1)),
        ),
        # a fake has two KV heads
        ("batched_as_kv_heads", (Batch((0, 1)), BatchDecode(1)), (Batch((0,)), BatchDecode(1))),
        ("left_a_batch", (Batch((0, 1)), Batch((1,))), (Batch((0, 1)), Batch((1, 0)))),
        ("left_a_batch", (Batch((0, 1)), Reset(1)), (Batch((0, 1)), TrimFront(1))),
    ],
)
def test_states_are_counted(state: str, reached: tuple[Operation, ...], missed: tuple[Operation, ...]) -> None:
    for operations, expected in ((reached, 1), (missed, 0)):
        assert judge(wide(), Program(operations, TWO)).tally.coverage.to_json()[state] == expected


@pytest.mark.parametrize(("rows", "alike"), [((0, 1), True), ((0, 1, 2), False)])
def test_batches_of_as_many_rows_as_kv_heads_are_told_from_others(rows: tuple[int, ...], alike: bool) -> None:
    """By the counters, and as evidence of the property: every row of every forward."""
    outcome = judge(wide(), Program((Batch(rows), BatchDecode(2)), THREE))
    cover = outcome.tally.coverage
    assert (cover.batched_as_kv_heads, cover.batched_unlike_kv_heads) == (int(alike), int(not alike))
    counted = outcome.tally.properties[SOLO]
    assert counted.kinds == {AS_KV_HEADS[alike]: 2 * len(rows)} and counted.decisive_steps == 2 * len(rows)
