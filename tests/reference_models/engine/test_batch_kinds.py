"""Batches of caches of every kind: each row holds, sees, forgets and refuses what it would alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import (
    BatchCache,
    BatchKVCache,
    BatchPagedKVCache,
    BlockPool,
    CacheSpec,
    CannotTrim,
    ChunkedKVCache,
    KVCache,
    PagedKVCache,
    RotatingKVCache,
    batch_mask,
    join_caches,
    load_caches,
    make_cache,
    masks,
    save_caches,
)

SPECS = (
    CacheSpec("rotating", window=5),
    CacheSpec("rotating", window=1),
    CacheSpec("rotating", window=7, sinks=3),
    CacheSpec("rotating", "int8", window=5),
    CacheSpec("chunked", chunk=4),
    CacheSpec("chunked", "affine4", chunk=3),
    CacheSpec("paged", block=3),
    CacheSpec("paged", "int8", block=4),
    CacheSpec("dense", "affine8"),
)
SHAPES = ((2, 32), (1, 64))  # (H, D) of keys and of values: as affine storage asks for
GARBAGE = 1e4  # what stands in padding at the right
WIDTH = 4  # numbers per operation: one for each row, repeated for larger batches

each = st.lists(st.integers(0, 7), min_size=WIDTH, max_size=WIDTH)
fresh = st.lists(st.lists(st.integers(1, 6), max_size=4), max_size=2)
operations = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4).map(lambda n: [n])),
    st.tuples(st.just("append"), st.just([1])),
    st.tuples(st.just("append"), each),
    st.tuples(st.just("filter"), st.lists(st.integers(0, 9), max_size=4)),
    st.tuples(st.just("extend"), fresh),
    st.tuples(st.just("remove"), st.just("rollback"), st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.just("remove"), st.just("trim_front"), st.integers(0, 9), st.integers(0, 9), st.integers(0, 2)),
    st.tuples(st.just("extract_and_join")),
)
programs = st.tuples(st.sampled_from(SPECS), fresh, st.lists(operations, min_size=1, max_size=9))


def maker(spec: CacheSpec) -> Callable[[], KVCache]:
    """Caches of a kind; paged ones take their blocks from one pool."""
    if spec.kind == "paged" and spec.block is not None:
        pool = BlockPool(spec.block, spec.storage)
        return lambda: PagedKVCache(pool)
    return lambda: make_cache(spec)


def by_position(cache: KVCache) -> list[bytes]:
    order = mx.argsort(cache.positions)
    return [
        b"" if not cache.held_len or side is None else np.array(side[:, :, order]).tobytes() for side in cache.rows()
    ]


class Twin:
    """A batch, and the caches of its rows alone."""

    def __init__(self, spec: CacheSpec, rows: Sequence[Sequence[int]]) -> None:
        self.make, self.made = maker(spec), 0
        self.rows: list[KVCache] = []
        self.rows = self.grown([*rows, []])
        self.batch: BatchCache = join_caches(self.rows)

    def new(self, batch: int, n: int) -> list[mx.array]:
        self.made += 1
        keys = mx.random.split(mx.random.key(self.made), 2)
        return [mx.random.normal((batch, h, n, d), key=key) for (h, d), key in zip(SHAPES, keys, strict=True)]

    def grown(self, rows: Sequence[Sequence[int]]) -> list[KVCache]:
        """A cache for each list of appends: of one token where it turns a ring."""
        caches = [self.make() for _ in rows]
        for cache, sizes in zip(caches, rows, strict=True):
            for n in sizes:
                cache.update_and_fetch(*self.new(1, n))
        return caches

    def append(self, lengths: Sequence[int]) -> None:
        lengths = [lengths[row % len(lengths)] for row in range(len(self.rows))]
        if not any(lengths):
            return
        n = max(lengths)
        if min(lengths) < n:
            self.batch.prepare(lengths)
        given = self.new(len(self.rows), n)
        real = (mx.arange(n) < mx.array(lengths)[:, None])[:, None, :, None]
        places, mask = np.array(self.batch.key_positions(n)), batch_mask(n, self.batch)
        fetched = self.batch.update_and_fetch(*(mx.where(real, side, GARBAGE) for side in given))
        assert all(side.shape[2] == places.shape[1] for side in fetched)
        for number, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            if not length:
                continue
            end = places.shape[1] - n + length
            (columns,) = np.nonzero(places[number, :end] >= 0)
            positions, shown = np.array(row.key_positions(length)), masks.chunk_mask(length, row)
            order = np.argsort(positions)
            assert positions[order].tolist() == places[number, columns].tolist()
            alone = row.update_and_fetch(*(side[number : number + 1, :, :length] for side in given))
            for mine, theirs in zip(fetched, alone, strict=True):
                assert np.array(mine)[number][:, columns].tobytes() == np.array(theirs)[0][:, order].tobytes()
            seen = np.ones((length, len(order)), bool) if shown is None else np.array(shown)[:, order]
            padded = np.zeros((length, places.shape[1]), bool)
            padded[:, columns] = seen
            assert (
                np.ones_like(padded) if mask is None else np.array(mask)[number, 0, :length]
            ).tolist() == padded.tolist()

    def filter(self, rows: Sequence[int]) -> None:
        rows = [row % len(self.rows) for row in rows] if self.rows else []
        self.rows = [self.rows[row].copy() for row in rows]
        assert self.batch.filter(rows) == tuple(row.offset for row in self.rows)

    def extend(self, rows: Sequence[Sequence[int]]) -> None:
        if new := self.grown(rows):
            before = len(self.rows)
            assert self.batch.extend(join_caches(new)) == tuple(range(before, before + len(new)))
            self.rows += new

    def remove(self, name: str, which: int, n: int, *keep: int) -> None:
        if not self.rows:
            return
        which %= len(self.rows)
        counts = [n if number == which else 0 for number in range(len(self.rows))]
        act = getattr(self.batch, name)
        try:
            removed = getattr(self.rows[which], name)(n, *keep)
        except CannotTrim as error:
            with pytest.raises(CannotTrim, match=re.escape(f"row {which}: {error}")):
                act(counts, *keep)
        else:
            assert act(counts, *keep) == tuple(removed if count else 0 for count in counts)

    def extract_and_join(self) -> None:
        if self.rows:
            self.batch = join_caches([self.batch.extract(row) for row in range(len(self.rows))])

    def check(self) -> None:
        batch, rows = self.batch, self.rows
        for name in ("offset", "live_start", "live_len", "held_len"):
            told = batch.offsets if name == "offset" else getattr(batch, name)
            assert told == tuple(getattr(row, name) for row in rows)
        for number, row in enumerate(rows):
            one = batch.extract(number)
            assert type(one) is type(row) and one.rule == row.rule and one.storage == row.storage
            assert batch.positions(number).tolist() == one.positions.tolist() == sorted(row.positions.tolist())
            assert by_position(one) == by_position(row)
            held = [b"" if side is None else np.array(side).tobytes() for side in batch.row(number)]
            assert held == by_position(row)


@settings(max_examples=150, deadline=None)
@given(programs)
def test_every_row_is_what_it_would_be_alone(program: Any) -> None:
    spec, rows, steps = program
    twin = Twin(spec, rows)
    twin.check()
    for name, *arguments in steps:
        getattr(twin, name)(*arguments)
        twin.check()


def of(spec: CacheSpec, *sizes: Sequence[int]) -> Twin:
    return Twin(spec, sizes)


def test_rings_that_have_turned_differently_fit_together() -> None:
    """One has turned token by token, one came in a single append, one is not full: the slots follow the positions."""
    twin = of(CacheSpec("rotating", window=4, sinks=1), [1] * 9, [11], [2])
    assert [row.positions.tolist() for row in twin.rows[:3]] == [[0, 7, 8, 6], list(range(11)), [0, 1]]
    twin.append([1])
    assert twin.batch.slot_positions.tolist() == [[0, 7, 8, 9], [0, 9, 10, 11], [-1, 0, 1, 2], [-1, -1, -1, 0]]
    twin.append([2, 1, 3, 1])
    twin.check()


def test_rows_stand_at_different_places_in_their_chunks() -> None:
    twin = of(CacheSpec("chunked", chunk=4), [4], [6])
    assert twin.batch.key_positions(1).tolist() == [[-1, -1, 4], [4, 5, 6], [-1, -1, 0]]
    twin.append([5, 2, 1])
    twin.check()


def test_a_refusal_changes_no_row() -> None:
    twin = of(CacheSpec("rotating", window=3), [5], [1, 1, 1, 1, 1])
    with pytest.raises(CannotTrim, match="row 1: cannot roll back 2"):
        twin.batch.rollback([2, 2, 0])
    twin.check()
    assert twin.batch.rollback([2, 0, 0]) == (2, 0, 0)
    with pytest.raises(CannotTrim, match=r"row 0: .* keeping 1"):
        twin.batch.trim_front([1, 0, 0], [1, 0, 0])
    assert twin.batch.trim_front([1, 9, 0]) == (1, 5, 0)


def test_a_row_without_a_new_token_forgets_nothing() -> None:
    """Or it would have to refuse what it would do alone."""
    twin = of(CacheSpec("rotating", window=2), [6], [1])
    twin.append([0, 3, 1])
    assert twin.batch.held_len[0] == 6 and twin.batch.rollback([4, 0, 0]) == (4, 0, 0)


def test_who_leaves_goes_on_in_the_blocks_that_it_had() -> None:
    pool = BlockPool(4)
    rows = [PagedKVCache(pool) for _ in range(2)]
    twin = Twin(CacheSpec("paged", block=4), [])
    for row in rows:
        row.update_and_fetch(*twin.new(1, 6))
    batch = BatchPagedKVCache.join(rows)
    assert pool.in_use == 4 and [pool.owners(block) for block in rows[0].table] == [2, 2]
    batch.update_and_fetch(*twin.new(2, 1))  # the last block of either row is copied, the first ones stay shared
    assert pool.in_use == 6 and batch.tables[0].table[0] == rows[0].table[0]
    out, was = batch.extract(0), by_position(batch.extract(0))
    assert out.pool is pool and out.table == batch.tables[0].table
    batch.filter([1])
    batch.update_and_fetch(*twin.new(1, 5))
    assert by_position(out) == was
    del out, batch
    assert pool.in_use == 4


def test_rows_of_different_pools_keep_them() -> None:
    twin = of(CacheSpec("paged", block=2), [3])
    other = of(CacheSpec("paged", block=5), [4])
    rows = [twin.rows[0], other.rows[0]]
    assert isinstance(rows[0], PagedKVCache) and isinstance(rows[1], PagedKVCache)
    batch = BatchPagedKVCache.join(rows)
    batch.update_and_fetch(*twin.new(2, 3))
    assert [batch.extract(row).pool for row in range(2)] == [rows[0].pool, rows[1].pool]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.kind != "paged"], ids=str)
def test_a_batch_goes_through_a_file(spec: CacheSpec, tmp_path: Any) -> None:
    twin = of(spec, [1] * 9, [7], [2, 2])
    save_caches(tmp_path / "batch.safetensors", [twin.batch])  # type: ignore[list-item]
    (twin.batch,) = load_caches(tmp_path / "batch.safetensors")
    twin.check()
    twin.append([2])
    twin.check()


def _full(cache: KVCache, heads: int = 2) -> KVCache:
    cache.update_and_fetch(mx.zeros((1, heads, 3, 4)), mx.zeros((1, heads, 3, 4)))
    return cache


@pytest.mark.parametrize(
    ("caches", "said"),
    [
        ([RotatingKVCache(4), RotatingKVCache(5)], "different kinds"),
        ([RotatingKVCache(4), RotatingKVCache(4, 1)], "different kinds"),
        ([RotatingKVCache(4), KVCache()], "different kinds"),
        ([ChunkedKVCache(4), RotatingKVCache(4)], "different kinds"),
        ([PagedKVCache(BlockPool(4)), KVCache()], "different kinds"),
        ([KVCache(), PagedKVCache(BlockPool(4))], "different kinds"),
        ([PagedKVCache(BlockPool(4)), PagedKVCache(BlockPool(4, "int8"))], "different storages"),
        ([_full(PagedKVCache(BlockPool(4))), _full(PagedKVCache(BlockPool(4)), 1)], "cannot stand in a batch"),
    ],
    ids=["windows", "sinks", "a ring", "chunks", "blocks first", "blocks last", "storages", "heads"],
)
def test_caches_that_cannot_be_rows_of_one_batch(caches: list[KVCache], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        join_caches(caches)
    first, second = map(join_caches, ([caches[0]], [caches[1]]))
    with pytest.raises(ValueError, match=said):
        first.extend(second)
    assert (first.batch, second.batch) == (1, 1)


def test_a_paged_batch_refuses_what_does_not_fit_and_changes_nothing() -> None:
    twin = of(CacheSpec("paged", block=2), [3])
    assert isinstance(twin.batch, BatchPagedKVCache)
    keys, values = twin.new(2, 2)
    for bad in ((keys[:1], values[:1]), (keys, values[:, :, :1]), (keys[..., :8], values), (keys[:, :1], values)):
        with pytest.raises(ValueError, match=r"keys|values"):
            twin.batch.update_and_fetch(*bad)
    twin.batch.prepare([3, 1])
    with pytest.raises(ValueError, match=r"prepared for lengths \[3, 1\], given 2"):
        twin.batch.update_and_fetch(keys, values)
    with pytest.raises(ValueError, match="append first"):
        twin.batch.filter([0])
    twin.batch.prepare(None)
    twin.check()
    with pytest.raises(ValueError, match="at least one"):
        BatchPagedKVCache.join([])
    assert isinstance(join_caches([KVCache()]), BatchKVCache)
