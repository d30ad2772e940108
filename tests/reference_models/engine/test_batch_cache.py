"""A batch of caches: every row is, byte for byte, what it would be alone. Bugs that the programs must find are planted
in ``test_batch_bites``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from kv_harness_batch_programs import programs, run

from reference_models.engine import BatchKVCache, KVCache, Storage, load_caches, save_caches

both_storages = pytest.mark.parametrize("storage", ["rows", "int8"])


@settings(max_examples=100, deadline=None)
@given(programs)
def test_every_row_is_what_it_would_be_alone(program: Any) -> None:
    run(program)


def rows(batch: int, n: int, seed: int = 0, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, mx.array]:
    keys, values = (
        mx.random.normal((batch, h, n, d), key=mx.random.key(seed + h)).astype(dtype) for h, d in ((2, 4), (1, 6))
    )
    return keys, values


def solo(n: int, storage: Storage = "rows", seed: int = 0, dtype: mx.Dtype = mx.float32) -> KVCache:
    cache = KVCache(storage)
    if n:
        cache.update_and_fetch(*rows(1, n, seed, dtype))
    return cache


def ragged(storage: Storage = "rows") -> BatchKVCache:
    """Rows of 6, 0 and 3 tokens; the last lost two behind a sink."""
    last = solo(5, storage, 9)
    last.trim_front(2, keep=1)
    return BatchKVCache.join([solo(6, storage), solo(0, storage), last])


def told(cache: BatchKVCache) -> tuple[Any, ...]:
    """All that can be seen of a batch, as values."""
    held = [None if side is None else np.array(side.astype(mx.float32)).tobytes() for side in cache.rows()]
    lengths = cache.offsets, cache.live_start, cache.live_len, cache.padding, cache.prepared
    return cache.storage, *lengths, cache.slot_positions.tolist(), held


def test_a_batch_says_where_its_rows_stand() -> None:
    cache = ragged()
    assert (cache.batch, cache.slots, cache.capacity) == (3, 6, 256)
    assert (cache.offsets, cache.live_start, cache.live_len) == ((6, 0, 5), (0, 0, 2), (6, 0, 3))
    assert cache.padding == (0, 6, 3)
    assert cache.offset.tolist() == [[6], [0], [5]] and cache.offset.dtype == mx.int32
    assert [cache.positions(row).tolist() for row in range(3)] == [[0, 1, 2, 3, 4, 5], [], [0, 3, 4]]
    assert cache.slot_positions.tolist() == [[0, 1, 2, 3, 4, 5], [-1] * 6, [-1, -1, -1, 0, 3, 4]]


@both_storages
def test_bytes(storage: Storage) -> None:
    cache = ragged(storage)
    per_row = {"rows": 4 * (2 * 4 + 6), "int8": (2 * 4 + 6) + 2 * (2 + 1)}[storage]
    assert (cache.bytes_per_slot, cache.nbytes) == (3 * per_row, 256 * 3 * per_row)
    empty = BatchKVCache(storage, 2)
    assert (empty.bytes_per_slot, empty.nbytes, empty.capacity, empty.rows()) == (0, 0, 0, (None, None))


@both_storages
def test_rows_grow_across_the_quantum_and_shrink_again(storage: Storage) -> None:
    cache = BatchKVCache.join([solo(255, storage), solo(3, storage, 7)])
    assert cache.capacity == 256
    cache.update_and_fetch(*rows(2, 1, 1))
    assert (cache.slots, cache.capacity) == (256, 256)
    cache.prepare([2, 1])
    cache.update_and_fetch(*rows(2, 2, 2))
    assert (cache.slots, cache.capacity, cache.padding) == (258, 512, (0, 253))
    assert cache.rollback([2, 2]) == (2, 2)
    assert (cache.slots, cache.capacity) == (256, 512)  # the end alone moved
    assert cache.trim_front([251, 0]) == (251, 0)
    assert (cache.slots, cache.capacity, cache.padding, cache.offsets) == (5, 256, (0, 2), (256, 3))


def test_a_batch_of_one_is_the_cache_itself() -> None:
    alone = solo(7)
    cache = BatchKVCache.join([alone])
    for step in range(3):
        for mine, theirs in zip(
            cache.update_and_fetch(*rows(1, 2, step)), alone.update_and_fetch(*rows(1, 2, step)), strict=True
        ):
            assert np.array(mine).tobytes() == np.array(theirs).tobytes()
        assert cache.trim_front([3], 1) == (alone.trim_front(3, 1),)
    assert cache.padding == (0,) and cache.positions(0).tolist() == alone.positions.tolist()


def test_sources_stay_as_they_are_and_share_nothing() -> None:
    sources = [solo(4), solo(2, seed=5)]
    cache, other = BatchKVCache.join(sources), ragged()
    was, others = told(cache), told(other)
    twin, one = cache.copy(), cache.extract(1)
    assert twin.extend(other) == (2, 3, 4)
    twin.filter([4, 0])
    twin.update_and_fetch(*rows(2, 3))
    one.update_and_fetch(*rows(1, 3))
    one.trim_front(1)
    assert told(cache) == was and told(other) == others
    assert [source.live_len for source in sources] == [4, 2] and one.offset == 5
    assert cache.extend(cache) == (2, 3) and cache.live_len == (4, 2, 4, 2)


def test_a_row_named_twice_is_two_rows() -> None:
    cache = ragged()
    assert cache.filter([2, 2]) == (5, 5)
    assert (cache.slots, cache.padding) == (3, (0, 0))
    cache.rollback([1, 0])
    assert [cache.positions(row).tolist() for row in (0, 1)] == [[0, 3], [0, 3, 4]]


def test_rows_that_lost_everything_stand_where_they_stood() -> None:
    cache = ragged()
    assert cache.trim_front([9, 9, 9]) == (6, 0, 3)
    assert (cache.capacity, cache.offsets, cache.live_start) == (0, (6, 0, 5), (6, 0, 5))
    wider = mx.ones((3, 5, 2, 8), mx.float16)  # nothing is bound any more
    cache.update_and_fetch(wider, wider)
    assert [cache.positions(row).tolist() for row in range(3)] == [[6, 7], [0, 1], [5, 6]]
    assert cache.filter([]) == () and (cache.batch, cache.slots, cache.capacity) == (0, 0, 0)
    assert cache.offset.shape == (0, 1) and cache.slot_positions.shape == (0, 0)
    cache.extend(ragged())
    assert cache.live_len == (6, 0, 3)


def test_a_reset_batch_has_as_many_fresh_rows() -> None:
    cache = ragged()
    cache.prepare([1, 0, 0])
    cache.reset()
    assert told(cache) == told(BatchKVCache("rows", 3)) and cache.capacity == 0


@both_storages
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_file_gives_back_what_went_in(tmp_path: Path, storage: Storage, dtype: mx.Dtype) -> None:
    cache = BatchKVCache.join([solo(4, storage, 1, dtype), solo(0, storage), solo(2, storage, 5, dtype)])
    cache.trim_front([1, 0, 0])
    path = tmp_path / "some.safetensors"
    save_caches(path, [cache, solo(3, storage), BatchKVCache(storage, 2)])
    again, alone, empty = load_caches(path)
    path.unlink()
    assert told(again) == told(cache) and told(empty) == told(BatchKVCache(storage, 2))
    assert type(alone) is KVCache and alone.offset == 3
    for one in (cache, again):
        one.update_and_fetch(*rows(3, 2, 4, dtype))
    assert told(again) == told(cache)


def test_a_state_that_does_not_belong_together_is_refused() -> None:
    arrays, metadata = ragged().state()
    row = {"offset": 4, "live_start": 0, "held": [[0, 4]]}
    with pytest.raises(ValueError, match=r"arrays of \(rows, slots\) \[\(3, 6\)\] for 1 rows in 4 slots"):
        BatchKVCache.from_state(arrays, metadata | {"rows": [row]})
    with pytest.raises(ValueError, match="live length of 5"):
        BatchKVCache.from_state(arrays, metadata | {"rows": [row | {"offset": 5}]})


def test_what_does_not_fit_is_refused_and_nothing_changes() -> None:
    cache = ragged()
    was = told(cache)
    two, three = rows(2, 1), rows(3, 2)
    wide = mx.ones((3, 2, 2, 5))
    other_dtype = BatchKVCache.join([solo(2, dtype=mx.float16)])
    refused: list[tuple[Any, str]] = [
        (lambda: cache.update_and_fetch(*two), r"buffers have \(3, 2, 4\)"),
        (lambda: BatchKVCache("rows", 3).update_and_fetch(*two), "for a batch of 3 rows"),
        (lambda: cache.update_and_fetch(three[0], rows(3, 1)[1]), "disagree in n: 2 and 1"),
        (lambda: cache.update_and_fetch(wide, wide), r"\(B, H, D\)"),
        (lambda: cache.update_and_fetch(three[0].astype(mx.float16), three[1]), "float16"),
        (lambda: cache.prepare([1, 2]), "2 lengths for a batch of 3 rows"),
        (lambda: cache.prepare([1, 2, -1]), "none may be negative"),
        (lambda: cache.prepare([0, 0, 0]), "no row would have a token"),
        (lambda: cache.filter([0, 3]), "row 3 of a batch of 3 rows"),
        (lambda: cache.filter([-1]), "row -1"),
        (lambda: cache.extract(3), "row 3"),
        (lambda: cache.positions(-1), "row -1"),
        (lambda: cache.trim_front([1]), "1 counts"),
        (lambda: cache.trim_front([1, 1, -1]), "negative"),
        (lambda: cache.trim_front([1, 1, 1], [1]), "1 sinks"),
        (lambda: cache.trim_front([1, 1, 1], -1), "negative"),
        (lambda: cache.rollback([1, 1, 1, 1]), "4 counts"),
        (lambda: cache.rollback([1, -1, 1]), "negative"),
        (lambda: cache.extend(BatchKVCache("int8")), "different storages in one batch: int8, rows"),
        (lambda: cache.extend(other_dtype), "float16 cannot stand .*float32"),
        (lambda: BatchKVCache.join([]), "at least one cache"),
        (lambda: BatchKVCache.join([solo(1), solo(1, "int8")]), "different storages"),
        (lambda: BatchKVCache("int4"), "unknown storage"),  # type: ignore[arg-type]
        (lambda: BatchKVCache("rows", -1), "-1 rows"),
    ]
    for act, message in refused:
        with pytest.raises(ValueError, match=message):
            act()
        assert told(cache) == was, message
    in_step = KVCache()
    in_step.update_and_fetch(*rows(2, 3))
    with pytest.raises(ValueError, match="a cache of 2 cannot join"):
        BatchKVCache.join([in_step])


def test_a_prepared_batch_waits_for_its_append() -> None:
    cache = ragged()
    cache.prepare([1, 3, 0])
    was = told(cache)
    for act in (
        lambda: cache.filter([0]),
        lambda: cache.extend(ragged()),
        lambda: ragged().extend(cache),
        lambda: cache.extract(0),
        lambda: cache.trim_front([1, 1, 1]),
        lambda: cache.rollback([1, 1, 1]),
        lambda: cache.state(),
    ):
        with pytest.raises(ValueError, match=r"prepared for lengths \[1, 3, 0\]"):
            act()
    with pytest.raises(ValueError, match=r"prepared for lengths \[1, 3, 0\], given 2 tokens a row"):
        cache.update_and_fetch(*rows(3, 2))
    assert told(cache) == was and cache.copy().prepared == (1, 3, 0)
    cache.prepare(None)
    assert cache.rollback([0, 0, 0]) == (0, 0, 0)
