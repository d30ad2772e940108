"""Copies of caches: independent whatever follows, whole in a file, and within the pool's reach alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import CachePool, KVCache, Storage, UnknownSequence, load_caches, save_caches

both_storages = pytest.mark.parametrize("storage", ["rows", "int8"])
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


def grown(storage: Storage = "rows", n: int = 6, dtype: mx.Dtype = mx.float32, seed: int = 0) -> KVCache:
    cache = KVCache(storage)
    extend(cache, n, seed, dtype)
    return cache


def extend(cache: KVCache, n: int, seed: int, dtype: mx.Dtype = mx.float32) -> None:
    keys, values = (
        mx.random.normal((1, h, n, d), key=mx.random.key(seed + h)).astype(dtype) for h, d in ((2, 4), (1, 6))
    )
    cache.update_and_fetch(keys, values)


def told(cache: KVCache) -> tuple[Any, ...]:
    """All that can be seen of a cache, as values. Rows in bytes, None without any."""
    rows = [
        None if side is None or cache.live_len == 0 else np.array(side.astype(mx.float32)).tobytes()
        for side in cache.rows()
    ]
    return cache.storage, cache.offset, cache.live_start, cache.positions.tolist(), rows


#: What can happen to a cache, as (method, arguments).
steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(1, 300)),
        st.tuples(st.just("trim_front"), st.integers(0, 300), st.integers(0, 5)),
        st.tuples(st.just("rollback"), st.integers(0, 300)),
    ),
    min_size=1,
    max_size=5,
)


def run(cache: KVCache, history: list[tuple[Any, ...]], seed: int) -> None:
    for number, (name, *arguments) in enumerate(history):
        if name == "extend":
            extend(cache, arguments[0], seed + number)
        else:
            getattr(cache, name)(*arguments)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(("rows", "int8")), steps, steps, steps)
def test_a_copy_and_its_source_never_see_each_other(storage: Storage, before: Any, mine: Any, theirs: Any) -> None:
    """What happens to the copy is what would have happened to the source, and to nobody else."""
    cache = grown(storage)
    run(cache, before, 10)
    twin, third = cache.copy(), cache.copy()
    was = told(cache)
    run(twin, mine, 20)
    assert told(cache) == told(third) == was
    run(cache, theirs, 30)
    assert told(third) == was
    run(third, mine, 20)
    assert told(third) == told(twin)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(("rows", "int8")), st.sampled_from(range(len(DTYPES))), steps, steps)
def test_a_file_gives_back_what_went_in(
    tmp_path_factory: pytest.TempPathFactory, storage: Storage, number: int, before: Any, after: Any
) -> None:
    dtype = DTYPES[number]
    cache, empty = KVCache(storage), KVCache(storage)
    extend(cache, 5, 1, dtype)
    for name, *arguments in before:
        if name != "extend":
            getattr(cache, name)(*arguments)
    path = tmp_path_factory.mktemp("caches") / "some.safetensors"
    save_caches(path, [cache, empty])
    again, nothing = load_caches(path)
    path.unlink()  # not needed any more
    assert (told(again), told(nothing)) == (told(cache), told(KVCache(storage)))
    assert again.bytes_per_slot in (cache.bytes_per_slot, 0 if cache.live_len == 0 else -1)
    assert again.nbytes <= cache.nbytes
    for one in (cache, again):
        for step, (name, *arguments) in enumerate(after):
            if name == "extend":
                extend(one, arguments[0], 50 + step, dtype)  # the dtype is still bound
            else:
                getattr(one, name)(*arguments)
    assert told(again) == told(cache)


def test_a_file_keeps_sinks_and_their_positions(tmp_path: Path) -> None:
    cache = grown(n=9)
    cache.trim_front(4, keep=2)
    save_caches(tmp_path / "c.safetensors", [cache])
    (again,) = load_caches(tmp_path / "c.safetensors")
    assert again.positions.tolist() == [0, 1, 6, 7, 8] and (again.offset, again.live_start) == (9, 4)


def test_another_safetensors_file_is_refused(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "w.safetensors"), {"a": mx.zeros((1,))})
    with pytest.raises(ValueError, match="holds no caches"):
        load_caches(tmp_path / "w.safetensors")


def test_a_state_that_does_not_belong_together_is_refused() -> None:
    arrays, metadata = grown().state()
    with pytest.raises(ValueError, match="arrays of \\[6\\] slots for a live length of 7"):
        KVCache.from_state(arrays, metadata | {"offset": 7})
    with pytest.raises(ValueError, match="live length of 6"):
        KVCache.from_state(arrays, metadata | {"held": [[0, 5]]})
    with pytest.raises(ValueError, match="unknown storage"):
        KVCache.from_state(arrays, metadata | {"storage": "int4"})


@both_storages
def test_a_reset_cache_is_a_fresh_one(storage: Storage) -> None:
    cache = grown(storage)
    cache.trim_front(2)
    cache.reset()
    assert told(cache) == told(KVCache(storage)) and (cache.nbytes, cache.capacity, cache.bytes_per_slot) == (0, 0, 0)
    rows = mx.ones((3, 5, 2, 7), mx.float16)  # any shape and dtype again
    cache.update_and_fetch(rows, rows)
    assert cache.positions.tolist() == [0, 1]


def test_bytes_per_slot() -> None:
    assert KVCache().bytes_per_slot == 0
    assert grown().bytes_per_slot == 4 * (2 * 4 + 6)
    assert grown("int8").bytes_per_slot == (2 * 4 + 6) + 2 * (2 + 1)  # and a scale for every row


def pool_of(*owners: Any) -> CachePool:
    pool = CachePool()
    for number, owner in enumerate(owners):
        pool.open([grown(seed=10 * number), grown(seed=10 * number + 5)], owner)
    return pool


def all_told(pool: CachePool, seq: int) -> list[tuple[Any, ...]]:
    return [told(cache) for cache in pool.forward_caches(seq)]


def test_a_snapshot_can_be_restored_again_and_into_another_sequence() -> None:
    pool = pool_of("pool", "pool")
    was = all_told(pool, 0)
    assert pool.snapshot(0, 3) == 2
    for _ in range(2):
        pool.trim_front(0, 2)
        pool.rollback(0, 3)
        for cache in pool.forward_caches(0):
            extend(cache, 4, 77)
        assert all_told(pool, 0) != was
        assert pool.restore(0, 3) == 2 and all_told(pool, 0) == was
    assert pool.restore(1, 3) == 2 and all_told(pool, 1) == was
    pool.trim_front(1, 2)
    assert all_told(pool, 0) == was


def test_the_newest_snapshot_of_a_slot_counts_and_an_empty_one_gives_nothing() -> None:
    pool = pool_of("pool")
    first = all_told(pool, 0)
    assert pool.restore(0, 0) == 0 and all_told(pool, 0) == first
    pool.snapshot(0, 0)
    pool.trim_front(0, 1)
    second = all_told(pool, 0)
    pool.snapshot(0, 0)
    pool.reset(0)
    assert pool.restore(0, 0) == 2 and all_told(pool, 0) == second
    assert pool.restore(0, 1) == 0


def test_a_fork_takes_everything_over_and_shares_nothing() -> None:
    pool = pool_of("pool", "pool")
    was = all_told(pool, 0)
    assert pool.fork(0, 1) == 2 and all_told(pool, 1) == was
    extend(pool.forward_caches(1)[0], 3, 1)
    pool.reset(0)
    assert all_told(pool, 1)[1] == was[1] and pool.offset(1) == 9 and pool.offset(0) == 0


def test_a_sequence_goes_through_a_file(tmp_path: Path) -> None:
    pool = pool_of("pool")
    pool.trim_front(0, 2, keep=1)
    was = all_told(pool, 0)
    assert pool.save_and_load(0, tmp_path / "s.safetensors") == 2 and all_told(pool, 0) == was


def test_what_the_model_owns_is_left_alone(tmp_path: Path) -> None:
    pool = pool_of("model", "pool")
    was = all_told(pool, 0), all_told(pool, 1)
    pool.snapshot(1, 1)
    path = tmp_path / "s.safetensors"
    assert pool.snapshot(0, 0) == pool.restore(0, 1) == pool.fork(0, 1) == pool.fork(1, 0) == 0
    assert pool.save_and_load(0, path) == pool.reset(0) == pool.restore(1, 0) == 0 and not path.exists()
    assert (all_told(pool, 0), all_told(pool, 1)) == was


def test_an_unknown_sequence_is_refused(tmp_path: Path) -> None:
    pool = pool_of("pool")
    actions: list[Any] = [
        lambda: pool.snapshot(7, 0),
        lambda: pool.restore(7, 0),
        lambda: pool.fork(7, 0),
        lambda: pool.fork(0, 7),
        lambda: pool.save_and_load(7, tmp_path / "s.safetensors"),
        lambda: pool.reset(7),
    ]
    for act in actions:
        with pytest.raises(UnknownSequence):
            act()
