"""Batches: what they mean in the ledger, in a run and to the judges, and what becomes of a program that has some."""

from __future__ import annotations

import json
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
    campaign,
    fake,
    judge,
    quirky,
)

import properties
from harness.batches import rows_after, tokens_in_batch
from harness.capability import needs
from harness.execution import Execution, execute
from harness.findings import Verdict
from harness.ledger import PoolLedger
from harness.lives import lives
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
from harness.profiles import Profile
from harness.recording import record
from harness.reduction import _candidates, _normal, reduce_finding
from harness.replay import Outcome, replay
from harness.retelling import untrimmed, without_batches, without_rejected
from harness.target import Capability
from harness.trace import read_trace
from harness.witnessing import history

TWO: Any = ("pool", "pool")
THREE: Any = ("pool", "pool", "pool")


def wide(*bugs: Any, **named: Any) -> FakeTarget:
    """With so many ids that hardly two tokens are the same."""
    return fake(*bugs, **{"vocab_size": 1000, **named})


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
        ((0, 1), EnforceMaxKvSize(4, sequence=1), (0,)),
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
        ("left_a_batch", (Batch((0, 1)), Batch((1,))), (Batch((0, 1)), Batch((1, 0)))),
        ("left_a_batch", (Batch((0, 1)), Reset(1)), (Batch((0, 1)), TrimFront(1))),
    ],
)
def test_states_are_counted(state: str, reached: tuple[Operation, ...], missed: tuple[Operation, ...]) -> None:
    for operations, expected in ((reached, 1), (missed, 0)):
        assert judge(wide(), Program(operations, TWO)).tally.coverage.to_json()[state] == expected
