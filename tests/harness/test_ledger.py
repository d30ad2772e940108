"""The ledger against a model that marks single tokens, and against the reference engine."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.ledger import SequenceLedger
from harness.operations import Decode, EnforceMaxKvSize, Operation, Owner, Prefill, Rollback, TrimFront
from reference_models.engine import CachePool, KVCache, enforce_max_kv_size

removals: st.SearchStrategy[Operation] = st.one_of(
    st.builds(TrimFront, st.integers(0, 40), st.integers(0, 40)),
    st.builds(Rollback, st.integers(0, 40)),
    st.builds(
        EnforceMaxKvSize,
        st.integers(1, 30),
        st.sampled_from(("trim", "sinks", "shift")),
        st.integers(0, 40),
        st.integers(0, 40),
    ),
)
histories = st.lists(st.one_of(st.builds(Prefill, st.integers(1, 20)), removals), max_size=14)
owners: st.SearchStrategy[Owner] = st.sampled_from(("pool", "pool", "model"))


class Tokens:
    """Brute force: every token ever written, and whether it is still there; one token is removed at a time."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.alive: dict[int, bool] = {}  # by position; a rolled back position is forgotten
        self.next = 0

    @property
    def held(self) -> list[int]:
        return sorted(position for position, there in self.alive.items() if there)

    def append(self, tokens: int) -> None:
        for _ in range(tokens):
            self.alive[self.next] = True
            self.next += 1

    def drop_oldest(self, n: int, keep: int) -> int:
        if self.owner == "model":
            return 0
        n = min(n, len(self.held))
        sinks = self.held[: min(keep, len(self.held) - n)]
        for _ in range(n):
            self.alive[next(position for position in self.held if position not in sinks)] = False
        return n

    def drop_newest(self, n: int) -> int:
        removed = 0
        while self.owner == "pool" and removed < n and self.held:
            del self.alive[self.held[-1]]
            self.next -= 1
            removed += 1
        return removed

    def remove(self, operation: Operation) -> int:
        if isinstance(operation, TrimFront):
            return self.drop_oldest(operation.n, operation.keep)
        if isinstance(operation, Rollback):
            return self.drop_newest(operation.n)
        assert isinstance(operation, EnforceMaxKvSize)
        live, limit = len(self.held), operation.limit
        if live <= limit:
            return 0
        if operation.generation == "trim":
            return self.drop_oldest(live - limit, 0)
        if operation.generation == "sinks":
            return self.drop_oldest(live - limit, 3 if limit == 4 else 4 if limit > 4 else limit - 1)
        keep = 0 if limit < 4 else min(operation.keep, limit - 4)
        half = (live - keep) // 2
        wanted = half if operation.n_discard == 0 else operation.n_discard
        return self.drop_oldest(min(max(wanted, live - limit), live - keep), keep)


@settings(max_examples=150, deadline=None)
@given(owners, histories)
def test_the_ledger_agrees_with_brute_force(owner: Owner, history: list[Operation]) -> None:
    ledger, tokens = SequenceLedger(owner), Tokens(owner)
    trimmed = removed = False
    for operation in history:
        if isinstance(operation, Prefill):
            before, start = tokens.held, tokens.next
            seen = ledger.append(operation.tokens)
            tokens.append(operation.tokens)
            assert list(seen.held) == before
            assert list(seen.positions) == list(range(start, start + operation.tokens))
        else:
            gone = tokens.remove(operation)
            assert ledger.remove(operation) == gone
            removed |= gone > 0
            trimmed |= gone > 0 and not isinstance(operation, Rollback)
        assert ledger.held == tokens.held
        assert ledger.offset == tokens.next
        state = ledger.state()
        assert state.live_len == len(tokens.held)
        assert state.live_start == tokens.next - len(tokens.held)
        assert (state.trimmed, state.removed) == (trimmed, removed)


@settings(max_examples=60, deadline=None)
@given(owners, histories)
def test_the_ledger_agrees_with_the_reference_engine(owner: Owner, history: list[Operation]) -> None:
    ledger, pool = SequenceLedger(owner), CachePool()
    caches = (KVCache(), KVCache())
    sequence = pool.open(caches, owner)
    held = mx.zeros((1, 1, 0, 1))
    for operation in history:
        if isinstance(operation, Prefill):
            positions = ledger.append(operation.tokens).positions
            row = mx.array(list(positions), dtype=mx.float32).reshape(1, 1, -1, 1)  # each key is its own position
            for cache in caches:
                held, _ = cache.update_and_fetch(row, row)
            assert held.reshape(-1).tolist() == ledger.held
        elif isinstance(operation, TrimFront):
            told = pool.trim_front(sequence, operation.n, operation.keep).removed
            check(ledger, operation, told, owner)
        elif isinstance(operation, Rollback):
            check(ledger, operation, pool.rollback(sequence, operation.n).removed, owner)
        else:
            assert isinstance(operation, EnforceMaxKvSize)
            report = enforce_max_kv_size(
                pool, sequence, operation.limit, operation.generation, operation.keep, operation.n_discard
            )
            check(ledger, operation, report.trim.removed, owner)
        for cache in caches:
            assert (cache.offset, cache.live_start, cache.live_len) == (
                ledger.offset,
                ledger.live_start,
                ledger.live_len,
            )


def check(ledger: SequenceLedger, operation: Operation, told: tuple[int, ...], owner: Owner) -> None:
    expected = ledger.remove(operation)
    if owner == "model":
        assert told == () and expected == 0
    elif expected > 0:
        assert told == (expected, expected)
    else:
        assert set(told) <= {0}


def test_the_published_recurrence() -> None:
    """P = 1024, C = 512: offset_i = (i - 1) C, live_i = min(live_(i-1) + C, P)."""
    ledger = SequenceLedger()
    seen = []
    for _ in range(4):
        append = ledger.append(512)
        seen.append((append.positions.start, len(append.held)))
        ledger.remove(EnforceMaxKvSize(1024))
    assert seen == [(0, 0), (512, 512), (1024, 1024), (1536, 1024)]
    # chunk 4: a mask sized by the offset is (512, 2048), attention receives 1536 keys
    assert (seen[3][0] + 512, seen[3][1] + 512) == (2048, 1536)


@pytest.mark.parametrize(
    ("rule", "held"),
    [
        (EnforceMaxKvSize(6), [4, 5, 6, 7, 8, 9]),
        (EnforceMaxKvSize(6, "sinks"), [0, 1, 2, 3, 8, 9]),
        (EnforceMaxKvSize(3, "sinks"), [0, 1, 9]),
        (EnforceMaxKvSize(1, "sinks"), [9]),
        (EnforceMaxKvSize(6, "shift", keep=2), [0, 1, 6, 7, 8, 9]),
        (EnforceMaxKvSize(9, "shift", keep=2), [0, 1, 6, 7, 8, 9]),  # half of what is not kept, more than the excess
        (EnforceMaxKvSize(6, "shift", keep=9, n_discard=5), [0, 1, 7, 8, 9]),  # keep is cut to limit - 4
        (EnforceMaxKvSize(6, "shift", keep=2, n_discard=100), [0, 1]),  # a discard is cut to what is not kept
        (EnforceMaxKvSize(2, "shift", keep=2), [8, 9]),
        (EnforceMaxKvSize(10, "shift"), list(range(10))),
    ],
)
def test_the_three_generations_by_hand(rule: EnforceMaxKvSize, held: list[int]) -> None:
    ledger = SequenceLedger()
    ledger.append(10)
    assert ledger.remove(rule) == 10 - len(held)
    assert ledger.held == held and ledger.offset == 10


def test_a_rollback_gives_its_positions_to_the_next_tokens() -> None:
    ledger = SequenceLedger()
    ledger.append(6)
    ledger.trim_front(2, keep=1)
    assert ledger.held == [0, 3, 4, 5]
    assert ledger.rollback(3) == 3
    assert (ledger.held, ledger.offset, ledger.live_start) == ([0], 3, 2)
    assert list(ledger.append(1).positions) == [3]


def test_an_operation_that_removes_nothing_by_nature_is_a_misuse() -> None:
    with pytest.raises(TypeError):
        SequenceLedger().remove(Decode(1))
