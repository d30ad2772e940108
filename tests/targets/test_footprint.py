"""What is found of the arrays that an object keeps alive."""

from __future__ import annotations

import gc
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness.targets.footprint import footprint
from reference_models.engine import BlockPool, KVCache, PagedKVCache

ARRAY = mx.zeros((3, 2))  # float32: 24 bytes


class Slotted:
    __slots__ = ("array", "nothing")

    def __init__(self) -> None:
        self.array = ARRAY

    def method(self) -> None: ...


class OfAClass:
    array = ARRAY


def function(array: Any = ARRAY) -> None: ...


def closure() -> Any:
    array = ARRAY
    return lambda: array


def knot() -> list[Any]:
    made: list[Any] = [ARRAY]
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("thing", "expected"),
    [
        (ARRAY, 24),
        (np.zeros((1, 5), np.int8), 5),
        ([ARRAY, (ARRAY, {"again": ARRAY})], 24),
        ([ARRAY, mx.zeros((2, 1))], 32),
        ([ARRAY, mx.zeros(2), mx.array(7), np.zeros(5)], 24),
        ({(1, Slotted()): None}, 24),
        ({1: deque([ARRAY])}, 24),
        ({frozenset({1}): [{"deep": SimpleNamespace(array=ARRAY)}]}, 24),
        (Slotted(), 24),
        (Slotted().method, 24),
        (function, 24),
        (partial(print, ARRAY), 24),
        (partial(print, end=ARRAY), 24),
        (closure(), 24),
        (knot(), 24),
        ([None, 1, "text", b"bytes", range(3), mx.float32, int, mx], 0),
        (OfAClass(), 0),
    ],
    ids=[
        *("array", "numpy", "shared", "two", "offsets", "key", "dict", "nested", "slots", "method"),
        *("default", "positional", "named", "closure", "knot", "nothing", "class"),
    ],
)
def test_every_array_is_found_once(thing: object, expected: int) -> None:
    assert footprint(thing) == expected


def test_a_cache_has_the_size_that_it_says() -> None:
    cache = KVCache("int8")
    assert footprint(cache) == 0
    cache.update_and_fetch(mx.ones((1, 2, 3, 4)), mx.ones((1, 2, 3, 8)))
    assert footprint(cache) == footprint([cache, cache]) == cache.nbytes > 0
    assert footprint([cache, cache.copy()]) == 2 * cache.nbytes
    cache.reset()
    assert footprint(cache) == 0


def test_of_a_pool_the_blocks_in_use_count_once() -> None:
    pool = BlockPool(4)
    caches = [PagedKVCache(pool) for _ in range(2)]
    assert footprint(caches) == 0
    caches[0].update_and_fetch(mx.ones((1, 2, 6, 4)), mx.ones((1, 2, 6, 4)))
    two = 2 * 4 * pool.bytes_per_slot
    assert footprint(caches) == two < pool.nbytes
    caches[1] = caches[0].copy()
    assert footprint(caches) == two
    caches[1].update_and_fetch(mx.ones((1, 2, 1, 4)), mx.ones((1, 2, 1, 4)))
    assert footprint(caches) == two * 3 // 2
    for cache in caches:
        cache.reset()
    assert footprint(caches) == 0 < pool.nbytes


def test_what_a_pool_keeps_beside_its_blocks_is_found() -> None:
    pool = BlockPool(4)
    pool.kept = [ARRAY]  # type: ignore[attr-defined]
    assert footprint(pool) == 24
    del pool.kept  # type: ignore[attr-defined]
    gc.collect()
    assert footprint(pool) == 0
