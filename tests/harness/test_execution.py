"""Applying operations: what a Step holds, which tokens are given, and where an execution stops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_harness_fake_target import FakeTarget

from harness.execution import Execution, execute
from harness.images import token_ids
from harness.operations import Chunk, Decode, EnforceMaxKvSize, Prefill, Program, Rollback, TrimFront


def test_a_step_holds_both_sides() -> None:
    run = execute(FakeTarget(), Program((Prefill(10), TrimFront(4, keep=1), Chunk(3), Decode(2), Rollback(2))))
    prefill, trim, chunk, decode, rollback = run.steps
    assert not run.stopped and [step.index for step in run.steps] == [0, 1, 2, 3, 4]
    assert (prefill.before.offset, prefill.after.offset, prefill.told[0].held) == (0, 10, tuple(range(10)))
    assert prefill.forwards[0].append.held == () and prefill.removal is None and prefill.expected_removed is None
    assert trim.expected_removed == 4 and trim.removal is not None and trim.removal.removed == (4, 4)
    assert not trim.before.trimmed and trim.after.trimmed
    assert str(trim.after) == "offset 10, live_start 4, live_len 6" and trim.forwards == ()
    assert chunk.forwards[0].append.held == (0, 5, 6, 7, 8, 9)
    assert chunk.forwards[0].append.positions == range(10, 13)
    assert [f.append.positions.start for f in decode.forwards] == [13, 14]
    assert rollback.expected_removed == 2 and rollback.after.offset == 13
    assert all(len(step.told) == 1 and step.told[0].state == step.after for step in run.steps)
    assert all(len(step.told[0].lengths) == len(step.told[0].rows) == 2 for step in run.steps)
    (told,) = rollback.told
    assert told.held == (0, *range(5, 13))
    assert [(c.offset, c.live_start, c.live_len) for c in told.lengths] == [(13, 4, 9)] * 2
    for rows in told.rows:  # the fake keeps (position, token) of every key
        assert rows.keys.shape == rows.values.shape == (1, 1, 9, 2)
        assert rows.keys[0, 0, :, 0].tolist() == list(told.held)


def test_other_sequences_are_looked_at_after_every_step() -> None:
    program = Program((Prefill(3), Prefill(2, 1), TrimFront(1, 0, 1), TrimFront(9)), ("pool", "model"))
    run = execute(FakeTarget(), program)
    assert [len(step.told) for step in run.steps] == [2] * 4
    first, second = run.steps[0].told
    assert (first.held, first.state.live_len, first.lengths[0].live_len) == ((0, 1, 2), 3, 3)
    assert (second.held, second.state.live_len, second.lengths[0].live_len) == ((), 0, 0)
    assert second.rows[0].keys.shape[-2] == 0
    assert run.steps[2].owner == "model" and run.steps[2].expected_removed == 0
    assert run.steps[2].removal is not None and run.steps[2].removal.removed == ()
    first, second = run.steps[3].told
    assert (first.held, first.state) == ((), run.steps[3].after)
    assert (second.held, second.state.live_len, second.lengths[0].live_len) == ((0, 1), 2, 2)
    assert second.rows[0].keys[0, 0, :, 0].tolist() == [0, 1]
    assert run.program == program


def test_an_enforcement_gives_the_rule_to_the_session() -> None:
    run = execute(FakeTarget(), Program((Prefill(10), EnforceMaxKvSize(6, "shift", keep=2))))
    assert run.steps[1].expected_removed == 4
    assert run.steps[1].removal is not None and run.steps[1].removal.removed == (4, 4)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_an_execution_stops_at_the_first_error(at: int) -> None:
    program = Program((Prefill(4), Decode(3), Chunk(2), Rollback(1)))
    run = execute(FakeTarget(fails_at=at), program)
    assert run.stopped
    assert len(run.steps) == {1: 1, 2: 2, 3: 2, 4: 2, 5: 3}[at]
    last = run.steps[-1]
    assert last.error == "RuntimeError: told to fail" and last.told == ()
    assert sum(len(step.forwards) for step in run.steps) == at
    assert run.program.operations == program.operations[: len(run.steps)]
    assert all(step.told for step in run.steps[:-1])
    with pytest.raises(RuntimeError, match="stopped"):
        run.apply(Chunk(1))


def test_a_rolled_back_position_gets_another_token() -> None:
    run = execute(FakeTarget(vocab_size=1000), Program((Prefill(5), Rollback(2), Chunk(2))))
    first, again = run.steps[0].forwards[0], run.steps[2].forwards[0]
    assert again.append.positions == range(3, 5)
    assert again.seen.tokens != first.seen.tokens[3:]


def test_how_tokens_are_cut_into_forwards_does_not_change_them() -> None:
    target = FakeTarget(vocab_size=1000)
    whole = execute(target, Program((Prefill(9),))).steps[0].forwards[0].seen.tokens
    cut = execute(target, Program((Prefill(2), Chunk(4), Decode(3))))
    assert sum((f.seen.tokens for step in cut.steps for f in step.forwards), ()) == whole


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 63), st.integers(0, 5000), st.integers(1, 40), st.integers(1, 200_000))
def test_token_ids_are_a_pure_function_within_the_vocabulary(sequence: int, start: int, count: int, vocab: int) -> None:
    ids = token_ids(sequence, count, start, vocab)
    assert len(ids) == count and all(0 <= token < vocab for token in ids)
    assert ids == tuple(token_ids(sequence, 1, start + i, vocab)[0] for i in range(count))


def test_token_ids_are_spread_and_differ_between_sequences() -> None:
    ids = [token_ids(sequence, 256, 0, 64) for sequence in range(3)]
    for some in ids:
        assert len(set(some)) > 40
        assert max(np.bincount(some)) < 20
    assert len(set(ids)) == 3


def test_two_sequences_do_not_share_their_counters() -> None:
    def tokens(run: Execution, sequence: int) -> Any:
        return [f.seen.tokens for s in run.steps if s.operation.index == sequence for f in s.forwards]

    target = FakeTarget(vocab_size=1000)
    both = execute(target, Program((Prefill(3), Prefill(2, 1), Chunk(2), Chunk(4, 1)), ("pool", "pool")))
    alone = execute(target, Program((Prefill(3), Chunk(2))))
    assert tokens(both, 0) == tokens(alone, 0)
    assert tokens(both, 1) != tokens(both, 0)
