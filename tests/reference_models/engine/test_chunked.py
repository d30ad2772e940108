"""ChunkedKVCache against a plain list of what a chunk must hold."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import CannotTrim, ChunkedKVCache, KVCache, Storage, chunk_mask
from tests.reference_models.engine.held import HeldModel, programs, run, told

both_storages = pytest.mark.parametrize("storage", ["rows", "int8"])


class ChunkModel(HeldModel):
    cache: ChunkedKVCache

    def __init__(self, chunk: int, storage: Storage = "rows", dims: tuple[int, int] | None = None) -> None:
        super().__init__(ChunkedKVCache(chunk, storage), lambda q, p: p // chunk == q // chunk, dims)
        self.chunk, self.longest = chunk, 0

    def placed(self, n: int) -> list[int]:
        self.longest = max(self.longest, n)
        first = self.offset // self.chunk * self.chunk
        return [p for p in self.slots if p >= first] + list(range(self.offset, self.offset + n))

    def capacity_bound(self) -> int:
        return self.chunk + self.longest


@both_storages
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), programs(12))
def test_any_program_equals_the_list_model(storage: Storage, chunk: int, program: list[tuple[str, int]]) -> None:
    run(ChunkModel(chunk, storage), program)


def filled(cache: KVCache, *counts: int) -> KVCache:
    for n in counts:
        cache.update_and_fetch(mx.ones((1, 1, n, 2)), mx.ones((1, 1, n, 2)))
    return cache


def test_a_chunk_ends_and_the_next_begins_with_nothing() -> None:
    cache = filled(ChunkedKVCache(4), *[1] * 4)
    assert (cache.live_len, cache.held_len) == (0, 4)  # what the next token, at position 4, sees
    assert cache.key_positions(2).tolist() == [4, 5]
    filled(cache, 1)
    assert cache.positions.tolist() == [4] and cache.capacity == 4
    filled(cache, 10)  # 5..14: over three chunks
    assert cache.positions.tolist() == list(range(4, 15))
    assert cache.key_positions(1).tolist() == [12, 13, 14, 15] and chunk_mask(1, cache) is None
    filled(cache, 1)
    assert cache.positions.tolist() == [12, 13, 14, 15] and cache.capacity == 4


@pytest.mark.parametrize("cut", [[13], [1] * 13, [4, 9], [5, 8], [3, 3, 3, 4], [9, 1, 1, 1, 1]])
def test_who_sees_whom_does_not_depend_on_the_cuts(cut: list[int]) -> None:
    cache, seen = ChunkedKVCache(4), {}
    for n in cut:
        at, keys, mask = cache.offset, cache.key_positions(n), chunk_mask(n, cache)
        for row in range(n):
            shown = keys if mask is None else keys[mx.array(np.flatnonzero(np.array(mask[row])))]
            seen[at + row] = shown.tolist()
        filled(cache, n)
    assert seen == {q: list(range(q // 4 * 4, q + 1)) for q in range(13)}


def test_no_rollback_into_a_chunk_that_is_gone_but_to_its_start() -> None:
    cache = filled(ChunkedKVCache(4), 6, 1, 1, 1)  # holds 8
    was = told(cache)
    with pytest.raises(CannotTrim, match="roll back 2 tokens to position 7: 3 of the 3 keys that it sees are gone"):
        cache.rollback(2)
    assert told(cache) == was
    assert cache.rollback(1) == 1 and (cache.offset, cache.held_len) == (8, 0)
    assert cache.rollback(4) == 4 and cache.key_positions(1).tolist() == [4]
    filled(cache, 1)
    assert cache.positions.tolist() == [4]


def test_a_rollback_over_a_border_is_possible_while_the_keys_are_there() -> None:
    cache = filled(ChunkedKVCache(4), 10)  # in one forward: nothing was dropped yet
    assert cache.rollback(3) == 3 and cache.key_positions(1).tolist() == [4, 5, 6, 7]


def test_a_front_trim_goes_by_position() -> None:
    cache = filled(ChunkedKVCache(4), *[1] * 7)  # holds 4 5 6
    for n, held in ((3, [4, 5, 6]), (2, [5, 6])):
        assert cache.trim_front(n) == n and cache.positions.tolist() == held
    mask = chunk_mask(3, cache)
    assert mask is not None and mask.tolist() == [
        [True, True, True, False, False],
        [False, False, False, True, False],
        [False, False, False, True, True],
    ]
    with pytest.raises(CannotTrim):
        cache.trim_front(1, keep=1)
    assert cache.trim_front(9, keep=1) == 2 and (cache.offset, cache.live_start, cache.capacity) == (7, 7, 0)


def test_bad_arguments_and_states_are_refused() -> None:
    with pytest.raises(ValueError, match="chunk 0"):
        ChunkedKVCache(0)
    arrays, metadata = filled(ChunkedKVCache(4), 4, 3).state()
    assert (metadata["kind"], metadata["chunk"], metadata["held"]) == ("chunked", 4, [[4, 7]])
    assert told(ChunkedKVCache.from_state(arrays, metadata)) == told(filled(ChunkedKVCache(4), 4, 3))
    with pytest.raises(ValueError, match="keys are missing"):
        ChunkedKVCache.from_state(arrays, metadata | {"chunk": 8})
