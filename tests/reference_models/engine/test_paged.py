"""PagedKVCache: what a dense cache holds, in blocks that are counted, shared, copied when written and used again."""

from __future__ import annotations

import copy
import gc
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from reference_models.engine import BlockPool, CachePool, KVCache, PagedKVCache, Storage, chunk_mask
from tests.reference_models.engine.held import DK, DV, HK, HV, fresh_rows, told

COUNTS = st.one_of(st.integers(0, 9), st.integers(0, 30))


def rows(first: int, n: int) -> tuple[mx.array, mx.array]:
    return mx.array(fresh_rows(first, n, HK, DK)), mx.array(fresh_rows(first, n, HV, DV))


def extend(first: int, n: int, *caches: KVCache) -> list[tuple[mx.array, mx.array]]:
    return [cache.update_and_fetch(*rows(first, n)) for cache in caches]


def seen(cache: KVCache) -> tuple[Any, ...]:
    """All but where the rows lie."""
    return (*told(cache)[:4], None if not cache.held_len else told(cache)[4])


class Sequences(RuleBasedStateMachine):
    """Sequences on one pool, each beside a dense cache that nobody shares."""

    block = 4
    storage: Storage = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(self.block, self.storage)
        self.pairs: list[tuple[PagedKVCache, KVCache]] = []
        self.written = 0
        self.open()

    def pick(self, number: int) -> tuple[PagedKVCache, KVCache]:
        return self.pairs[number % len(self.pairs)]

    @precondition(lambda self: len(self.pairs) < 5)
    @rule()
    def open(self) -> None:
        self.pairs.append((PagedKVCache(self.pool), KVCache(self.storage)))

    @rule(number=st.integers(0, 4), n=st.one_of(st.just(1), st.integers(1, 14)))
    def append(self, number: int, n: int) -> None:
        paged, dense = self.pick(number)
        assert paged.key_positions(n).tolist() == dense.key_positions(n).tolist()
        got, wanted = extend(self.written, n, paged, dense)
        self.written += n
        for one, other in zip(got, wanted, strict=True):
            assert np.array(one).tobytes() == np.array(other).tobytes() and one.shape == other.shape

    @rule(number=st.integers(0, 4), n=COUNTS, keep=st.sampled_from((0, 0, 0, 1, 3, 5)))
    def trim(self, number: int, n: int, keep: int) -> None:
        paged, dense = self.pick(number)
        assert paged.trim_front(n, keep) == dense.trim_front(n, keep)

    @rule(number=st.integers(0, 4), n=COUNTS)
    def rollback(self, number: int, n: int) -> None:
        paged, dense = self.pick(number)
        assert paged.rollback(n) == dense.rollback(n)

    @precondition(lambda self: len(self.pairs) < 5)
    @rule(number=st.integers(0, 4), how=st.sampled_from((PagedKVCache.copy, copy.copy, copy.deepcopy)))
    def fork(self, number: int, how: Any) -> None:
        paged, dense = self.pick(number)
        self.pairs.append((how(paged), dense.copy()))

    @rule(number=st.integers(0, 4), reset=st.booleans())
    def end(self, number: int, reset: bool) -> None:
        paged, dense = self.pick(number)
        if reset:
            paged.reset()
            dense.reset()
        elif len(self.pairs) > 1:
            del self.pairs[number % len(self.pairs)]  # nobody says goodbye

    @rule(number=st.integers(0, 4))
    def go_through_state(self, number: int) -> None:
        """What comes back has a pool of its own, and the blocks here are free again."""
        paged, dense = self.pick(number)
        again = PagedKVCache.from_state(*paged.state())
        assert seen(again) == seen(dense) and again.pool is not self.pool
        assert again.pool.in_use == len(again.table) == -(-again.held_len // self.block)
        extend(self.written, 3, again)

    @invariant()
    def every_sequence_is_its_dense_twin(self) -> None:
        for paged, dense in self.pairs:
            assert seen(paged) == seen(dense)
            assert len(paged.table) == -(-(paged.first + paged.held_len) // self.block) if paged.held_len else True
            assert paged.held_len or (paged.table, paged.first) == ([], 0)
            assert paged.capacity == len(paged.table) * self.block and 0 <= paged.first < self.block
            assert paged.nbytes == paged.capacity * self.pool.bytes_per_slot

    @invariant()
    def every_block_is_counted(self) -> None:
        tables = [block for paged, _ in self.pairs for block in paged.table]
        assert self.pool.in_use == len(set(tables))
        assert all(self.pool.owners(block) == tables.count(block) for block in tables)
        assert (self.pool.in_use + self.pool.free) * self.block * self.pool.bytes_per_slot <= self.pool.nbytes

    def teardown(self) -> None:
        self.pairs.clear()
        assert self.pool.in_use == 0


@pytest.mark.parametrize(("block", "storage"), [(4, "rows"), (1, "rows"), (16, "rows"), (4, "int8"), (3, "int8")])
def test_any_sequences_on_one_pool(block: int, storage: Storage) -> None:
    machine = type(f"Sequences_{block}_{storage}", (Sequences,), {"block": block, "storage": storage})
    run_state_machine_as_test(machine, settings=settings(max_examples=25, stateful_step_count=25, deadline=None))


def test_copies_share_until_one_of_them_writes() -> None:
    pool = BlockPool(4)
    source = PagedKVCache(pool)
    extend(0, 10, source)  # two full blocks and half of one
    twin = source.copy()
    assert twin.table == source.table and pool.in_use == 3
    extend(50, 1, twin)
    assert twin.table[:2] == source.table[:2] and twin.table[2] != source.table[2] and pool.in_use == 4
    was = list(source.table)
    extend(60, 1, source)  # its half block is its own again: nothing to copy
    assert source.table == was and pool.in_use == 4
    keys, _ = source.rows()
    assert keys is not None and np.array_equal(keys[:, :, 10:], rows(60, 1)[0])
    third = twin.copy()
    third.trim_front(9)  # reading and dropping write nothing
    assert pool.in_use == 4 and third.table == twin.table[2:] and third.first == 1
    del source, twin, third
    gc.collect()
    assert pool.in_use == 0


def test_a_full_last_block_is_never_copied() -> None:
    pool = BlockPool(4)
    source = PagedKVCache(pool)
    extend(0, 8, source)
    twin = source.copy()
    extend(20, 2, twin)
    assert twin.table[:2] == source.table and pool.in_use == 3


def test_a_front_trim_gives_whole_blocks_back_and_keeps_an_offset() -> None:
    pool = BlockPool(4)
    cache = PagedKVCache(pool)
    extend(0, 14, cache)
    assert (pool.in_use, cache.trim_front(3), cache.first, pool.in_use) == (4, 3, 3, 4)
    assert (cache.trim_front(2), cache.first, pool.in_use) == (2, 1, 3)
    mask = chunk_mask(2, cache)
    assert mask is not None and mask.shape == (2, 11)
    assert cache.trim_front(4, keep=2) == 4 and (cache.first, pool.in_use) == (0, 2)
    assert cache.positions.tolist() == [5, 6, 11, 12, 13] and cache.capacity == 8
    assert cache.trim_front(9) == 5 and (cache.table, pool.in_use, cache.live_start) == ([], 0, 14)


def test_a_rollback_gives_blocks_back() -> None:
    pool = BlockPool(4)
    cache = PagedKVCache(pool)
    extend(0, 14, cache)
    cache.trim_front(3)
    assert (cache.rollback(6), pool.in_use) == (6, 2) and (cache.rollback(1), pool.in_use) == (1, 2)
    assert (cache.rollback(9), pool.in_use, cache.first, cache.rows()) == (4, 0, 0, (None, None))


def test_nothing_of_another_sequence_leaks_from_a_reused_block() -> None:
    """A freed block keeps its rows; only what was written since may be seen."""
    pool = BlockPool(4)
    poison = PagedKVCache(pool)
    huge = mx.full((1, 1, 255, 2), 9e30)
    poison.update_and_fetch(huge, huge)
    freed = set(poison.table)
    poison.reset()
    stale = np.array(pool.read(mx.arange(252))[0][0])
    assert (stale > 1e30).all() and pool.in_use == 0  # it is all still there
    cache, dense = PagedKVCache(pool), KVCache()
    for step, (n, back, front) in enumerate([(5, 0, 0), (1, 3, 0), (9, 0, 2), (3, 4, 3), (2, 0, 0), (7, 1, 8)]):
        new = mx.full((1, 1, n, 2), float(step + 1))
        for one, other in zip(cache.update_and_fetch(new, -new), dense.update_and_fetch(new, -new), strict=True):
            assert mx.array_equal(one, other) and mx.max(mx.abs(one)).item() < 10
        for each in (cache, dense):
            each.rollback(back)
            each.trim_front(front)
        twin = cache.copy()
        twin.update_and_fetch(huge[:, :, :3], huge[:, :, :3])
        assert seen(cache) == seen(dense)
    assert set(cache.table) <= freed


def test_blocks_are_counted_and_cannot_be_freed_twice() -> None:
    pool = BlockPool(4)
    assert (pool.in_use, pool.free, pool.nbytes, pool.bytes_per_slot) == (0, 0, 0, 0)
    with pytest.raises(RuntimeError, match="nothing was written"):
        pool.take(1)
    cache = PagedKVCache(pool)
    extend(0, 5, cache)
    assert (pool.in_use, pool.free) == (2, 62)  # 256 slots, the quantum
    first, second = cache.table
    pool.share([first])
    for blocks in ([first] * 3, [second, second], [second, 40], [64], [-1]):
        with pytest.raises(RuntimeError, match=f"double free: block {blocks[-1]} "):
            pool.release(blocks)
        assert (pool.owners(first), pool.owners(second), pool.in_use) == (2, 1, 2)
    pool.release([first])
    with pytest.raises(RuntimeError, match="block 40 is free"):
        pool.share([first, 40])
    assert pool.owners(first) == 1
    extend(5, 300, cache)
    assert pool.in_use == 77 and pool.in_use + pool.free == 128


def test_rows_that_do_not_fit_are_refused_and_change_nothing() -> None:
    with pytest.raises(ValueError, match="block 0"):
        BlockPool(0)
    with pytest.raises(ValueError, match="unknown storage"):
        BlockPool(4, "int4")  # type: ignore[arg-type]
    pool = BlockPool(4)
    cache, other = PagedKVCache(pool), PagedKVCache(pool)
    extend(0, 5, cache)
    was = told(cache)
    for keys, values, match in (
        (mx.ones((1, 1, 2, 3)), mx.ones((1, 1, 2, 3)), "the buffers have"),
        (*rows(0, 2)[:1], rows(0, 3)[1], "disagree in B or n"),
        (*(side.astype(mx.float16) for side in rows(0, 1)), "the buffers hold"),
    ):
        for one in (cache, other):
            with pytest.raises(ValueError, match=match):
                one.update_and_fetch(keys, values)
        assert told(cache) == was and (other.offset, pool.in_use) == (0, 2)
    cache.trim_front(5)
    other.update_and_fetch(mx.ones((1, 1, 2, 3), mx.float16), mx.ones((1, 1, 2, 3), mx.float16))  # nobody is in the way
    assert pool.in_use == 1


@pytest.mark.parametrize("storage", ["int8", "affine8", "affine4"])
def test_it_becomes_quantised_in_a_pool_of_its_own(storage: Storage) -> None:
    pool, dense = BlockPool(4), KVCache()
    paged = PagedKVCache(pool)
    keys = mx.random.normal((1, 2, 11, 32), key=mx.random.key(2))
    for cache in (paged, dense):
        cache.update_and_fetch(keys, -keys)
        cache.trim_front(3, keep=1)
    was = told(paged)
    late, wanted = paged.to_storage(storage), dense.to_storage(storage)
    assert told(paged) == was and isinstance(late, PagedKVCache) and late.pool is not pool
    for cache in (late, wanted):
        cache.update_and_fetch(keys[:, :, :2], keys[:, :, :2])
    assert seen(late) == seen(wanted) and pool.in_use == 2
    with pytest.raises(ValueError, match="turn"):
        late.to_storage(storage)
    odd = PagedKVCache(BlockPool(4))
    odd.update_and_fetch(mx.ones((1, 1, 1, 8)), mx.ones((1, 1, 1, 8)))
    if storage != "int8":
        with pytest.raises(ValueError, match="keys have D=8"):
            odd.to_storage(storage)


def test_snapshots_and_forks_of_the_scheduler_share_and_leak_nothing() -> None:
    blocks = BlockPool(4)
    pool, spare = CachePool(), PagedKVCache(blocks)
    caches = [PagedKVCache(blocks)]
    extend(0, 9, *caches, spare)
    seq, other = pool.open(caches), pool.open([spare])
    del caches, spare
    assert blocks.in_use == 6
    pool.snapshot(seq, 0)
    pool.fork(seq, other)
    assert blocks.in_use == 3
    extend(20, 4, *pool.forward_caches(other))
    assert blocks.in_use == 5  # a copy of the half block, and one more
    pool.restore(other, 0)
    assert blocks.in_use == 3
    pool.reset(seq)
    pool.close(other)
    assert blocks.in_use == 3  # the snapshot
    pool.restore(seq, 0)
    assert pool.live_len(seq) == 9
