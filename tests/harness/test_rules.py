"""What caches forget by themselves: the rule, the ledger under it, and what a run and its trace say of a refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import properties
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import judge_program
from harness.ledger import PoolLedger
from harness.operations import Chunk, Decode, EnforceMaxKvSize, Prefill, Program, Rollback, TrimFront, Verify
from harness.oracle import of_layer, visible_set
from harness.recording import record
from harness.rules import CacheRule
from harness.targets.reference import ReferenceTarget, targets
from reference_models.engine import CannotTrim, RotatingKVCache

RING, SINKS, PIECES = CacheRule(window=4), CacheRule(window=5, sinks=2), CacheRule(chunk=3)


@pytest.mark.parametrize(
    ("rule", "query", "seen"),
    [
        (RING, 2, [0, 1]),
        (RING, 6, [3, 4, 5]),
        (SINKS, 3, [0, 1, 2]),
        (SINKS, 8, [0, 1, 6, 7]),
        (PIECES, 5, [3, 4]),
        (PIECES, 6, []),
    ],
)
def test_what_a_token_sees_of_all_before_it(rule: CacheRule, query: int, seen: list[int]) -> None:
    assert list(rule.seen_from(query, range(query))) == seen


@given(
    st.one_of(
        st.builds(CacheRule, st.integers(4, 9), st.integers(0, 3)),
        st.builds(lambda n, keeps: CacheRule(chunk=n, keeps=n if keeps else None), st.integers(1, 6), st.booleans()),
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
)
def test_what_is_visible_does_not_depend_on_the_cuts(rule: CacheRule, sizes: list[int]) -> None:
    pool = PoolLedger(("pool",), (rule,))
    for size in sizes:
        append = of_layer(pool.sequences[0].append(size), rule)
        keys = [*append.held, *append.positions]
        for row, query in zip(visible_set(append, None, rule), append.positions, strict=True):
            assert [key for key, shown in zip(keys, row, strict=True) if shown] == [
                key for key in range(query + 1) if rule.shows(query, key)
            ]
    assert set(rule.seen_from(pool.sequences[0].offset, range(pool.sequences[0].offset))) <= set(
        pool.sequences[0].kept[rule]
    )


def test_a_cache_that_cannot_turn_back_refuses_as_soon_as_it_is_full() -> None:
    """Also where nothing that would be needed is gone, which is what another one asks."""
    stuck = CacheRule(window=4, rewinds=False)
    for rule, sizes, removed in ((stuck, (3,), 1), (stuck, (4,), 0), (RING, (4,), 1), (stuck, (3, 2), 0)):
        ledger = PoolLedger(("pool",), (rule,)).sequences[0]
        for size in sizes:
            ledger.append(size)
        assert (ledger.rollback(1), ledger.refused) == (removed, not removed)


def test_a_rollback_is_refused_where_its_next_token_would_miss_a_key() -> None:
    pool = PoolLedger(("pool",), (RING, None))
    sequence = pool.sequences[0]
    for _ in range(8):
        sequence.append(1)
    assert sequence.kept[RING] == [4, 5, 6, 7]
    assert (sequence.remove(Rollback(1)), sequence.refused) == (1, False)  # 7 needs 4 to 6, which are there
    assert (sequence.remove(Rollback(1)), sequence.refused) == (0, True)  # 6 would need 3
    assert (sequence.offset, sequence.live_len) == (7, 7)
    assert (sequence.remove(Rollback(100)), sequence.refused) == (7, False)  # nothing left to miss


def test_beside_states_nothing_goes_back_and_nothing_is_forgotten() -> None:
    rule = CacheRule(states=True)
    sequence = PoolLedger(("pool",), (rule,)).sequences[0]
    sequence.append(5)
    assert list(of_layer(sequence.append(2), rule).held) == list(range(5)) and not rule.forgets
    assert (sequence.remove(Rollback(1)), sequence.refused, sequence.offset) == (0, True, 7)
    assert (sequence.remove(Rollback(0)), sequence.refused) == (0, False)
    assert not sequence.state().forgotten and RING.forgets and PIECES.forgets


def test_a_cache_may_keep_more_than_it_shows_and_goes_back_over_that() -> None:
    rule = CacheRule(chunk=3, keeps=3)
    sequence = PoolLedger(("pool",), (rule, None)).sequences[0]
    sequence.append(5)
    assert list(of_layer(sequence.append(2), rule).held) == [3, 4]  # what a token sees is the business of chunks
    assert sequence.kept[rule] == [2, 3, 4, 5, 6]
    assert (sequence.remove(Rollback(2)), sequence.refused) == (2, False)  # 5 needs 3 and 4
    assert (sequence.remove(Rollback(3)), sequence.refused) == (0, True)  # 2 would need 0 and 1
    assert (sequence.remove(Rollback(5)), sequence.refused) == (0, True)  # 0 needs nothing, but only 3 keys are there
    assert (sequence.offset, sequence.kept[rule]) == (5, [2, 3, 4])


def test_sinks_and_positions_do_not_go_together() -> None:
    for rule, operation in ((SINKS, TrimFront(2)), (RING, TrimFront(2, 1)), (RING, EnforceMaxKvSize(2, "sinks"))):
        pool = PoolLedger(("pool",), (rule,))
        pool.sequences[0].append(6)
        assert (pool.sequences[0].remove(operation), pool.sequences[0].refused) == (0, True)
        assert pool.sequences[0].held == list(range(6)) and not pool.sequences[0].trimmed


def test_a_bound_counts_what_is_seen_where_no_cache_keeps_all() -> None:
    pool = PoolLedger(("pool",), (RING,))
    pool.sequences[0].append(9)
    assert pool.sequences[0].seen_len == 3 and pool.sequences[0].enforce(EnforceMaxKvSize(3)) == 0
    assert pool.sequences[0].enforce(EnforceMaxKvSize(2)) == 7


def ring() -> ReferenceTarget:
    return next(target for target in targets("nemotron_nas") if target.storage == "rotating-6")


def test_a_refusal_is_no_error_and_stands_in_the_trace() -> None:
    program = Program((Prefill(9), Decode(2), Rollback(2), Verify(2, 0), Chunk(3)))
    run = judge_program(ring(), program, properties.ALL).run
    assert [step.refuses for step in run.steps] == [False, False, True, False, False]
    refused = record(run, None, {}).steps[2]
    assert refused["must_be_refused"] and "cannot roll back 2 tokens" in refused["refused"]
    assert "refused" not in record(run, None, {}).steps[3]


def test_a_cache_that_should_refuse_and_does_not_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RotatingKVCache, "check_rollback", lambda self, n: None)
    with pytest.raises(FindingError, match="it was not refused, although a cache no longer has what would be needed"):
        judge_program(ring(), Program((Prefill(9), Decode(2), Rollback(2))), properties.ALL)


def test_nothing_is_judged_behind_a_refusal_that_did_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches hold other keys than the ledger then, and every property would say so, each in its words."""
    program = Program((Prefill(9), Decode(2), Rollback(2), Chunk(3)))
    assert not execute(ring(), program).stopped
    others = [prop for prop in properties.ALL if prop.id != "trim_reports_what_it_removed"]
    for wrong, steps in ((lambda self, n: None, 5), (_refuses, 2)):
        monkeypatch.setattr(RotatingKVCache, "check_rollback", wrong)
        run = judge_program(ring(), Program((Prefill(3), Rollback(1), Chunk(9), *program.operations[1:])), others).run
        assert run.stopped and run.steps[-1].parted and run.steps[-1].error is None
        assert len(run.steps) == steps


def _refuses(self: RotatingKVCache, n: int) -> None:
    raise CannotTrim("it does not want to")


def test_nothing_is_refused_without_a_rule() -> None:
    run = execute(targets("nemotron_nas")[0], Program((Prefill(9), TrimFront(3, 2), Rollback(4))))
    assert not any(step.refuses for step in run.steps)
    assert run.steps[-1].after.forgotten is False
