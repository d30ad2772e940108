"""The bound of the scheduler over caches that forget by a rule: it counts what is seen and trims by position."""

from __future__ import annotations

import mlx.core as mx
import pytest

from reference_models.engine import (
    BlockPool,
    CachePool,
    CannotTrim,
    ChunkedKVCache,
    Generation,
    KVCache,
    PagedKVCache,
    RotatingKVCache,
    enforce_max_kv_size,
)


def opened(*caches: KVCache, tokens: int = 40) -> tuple[CachePool, int]:
    pool = CachePool()
    for cache in caches:
        for _ in range(tokens):
            cache.update_and_fetch(mx.ones((1, 1, 1, 2)), mx.ones((1, 1, 1, 2)))
    return pool, pool.open(caches)


@pytest.mark.parametrize("generation", ["trim", "shift"])
def test_a_bound_below_the_window_holds(generation: Generation) -> None:
    pool, seq = opened(RotatingKVCache(9), RotatingKVCache(6))
    report = enforce_max_kv_size(pool, seq, 4, generation, keep=0)
    assert (report.live_before, report.depth, report.trim.removed) == (8, 36, (36, 36))
    assert [sorted(cache.positions.tolist()) for cache in pool.forward_caches(seq)] == [[36, 37, 38, 39]] * 2
    assert enforce_max_kv_size(pool, seq, 4, generation, keep=0).depth == 0


def test_a_bound_that_the_window_keeps_anyway_trims_nothing() -> None:
    pool, seq = opened(RotatingKVCache(9, sinks=2), ChunkedKVCache(8))
    assert enforce_max_kv_size(pool, seq, 8, "sinks").depth == 0
    with pytest.raises(CannotTrim):
        enforce_max_kv_size(pool, seq, 7)
    assert [cache.live_start for cache in pool.forward_caches(seq)] == [0, 0]


def test_dense_and_rotating_layers_go_together() -> None:
    pool, seq = opened(KVCache(), RotatingKVCache(9), PagedKVCache(BlockPool(4)))
    report = enforce_max_kv_size(pool, seq, 6)
    assert (report.live_before, report.depth, report.trim.removed) == (40, 34, (34, 34, 34))
    assert {tuple(sorted(cache.positions.tolist())) for cache in pool.forward_caches(seq)} == {tuple(range(34, 40))}
