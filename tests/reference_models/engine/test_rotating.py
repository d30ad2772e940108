"""RotatingKVCache against a plain list of what a window must hold."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import CannotTrim, KVCache, RotatingKVCache, Storage, VisibilityRule, chunk_mask
from tests.reference_models.engine.held import HeldModel, programs, run, told

both_storages = pytest.mark.parametrize("storage", ["rows", "int8"])


class RingModel(HeldModel):
    cache: RotatingKVCache

    def __init__(
        self, window: int, sinks: int = 0, storage: Storage = "rows", dims: tuple[int, int] | None = None
    ) -> None:
        cache = RotatingKVCache(window, sinks, storage)
        super().__init__(cache, lambda q, p: p < sinks or p > q - (window - sinks), dims)
        self.window, self.sinks, self.longest = window, sinks, 0

    def placed(self, n: int) -> list[int]:
        new = list(range(self.offset, self.offset + n))
        self.longest = max(self.longest, n)
        if n == 1 and len(self.slots) < self.window:
            return self.slots + new
        others = sorted(position for position in self.slots if position >= self.sinks)
        if n == 1 and len(self.slots) == self.window:
            return [new[0] if position == others[0] else position for position in self.slots]
        kept = max(0, self.window - self.sinks - 1)
        return list(range(min(self.sinks, self.offset))) + (others[-kept:] if kept else []) + new

    def capacity_bound(self) -> int:
        return self.window + self.longest


shapes = st.integers(1, 9).flatmap(lambda window: st.tuples(st.just(window), st.integers(0, min(3, window - 1))))


@both_storages
@settings(max_examples=60, deadline=None)
@given(shapes, st.data())
def test_any_program_equals_the_list_model(storage: Storage, shape: tuple[int, int], data: st.DataObject) -> None:
    run(RingModel(*shape, storage), data.draw(programs(12, trims=shape[1] == 0)))


def rows(n: int, fill: float = 1.0) -> mx.array:
    return mx.full((1, 1, n, 2), fill)


def filled(cache: KVCache, *counts: int) -> KVCache:
    for n in counts:
        cache.update_and_fetch(rows(n), rows(n))
    return cache


def test_single_tokens_turn_the_ring() -> None:
    cache = filled(RotatingKVCache(4), 1, 1, 1)
    for expected in ([0, 1, 2, 3], [4, 1, 2, 3], [4, 5, 2, 3], [4, 5, 6, 3], [4, 5, 6, 7], [8, 5, 6, 7]):
        assert cache.key_positions(1).tolist() == expected and chunk_mask(1, cache) is None
        filled(cache, 1)
        assert cache.positions.tolist() == expected and (cache.live_len, cache.held_len) == (3, 4)
        assert cache.capacity == 4


def test_the_ring_turns_behind_its_sinks() -> None:
    cache = filled(RotatingKVCache(4, sinks=2), 5)
    assert cache.positions.tolist() == [0, 1, 2, 3, 4]
    for expected in ([0, 1, 4, 5], [0, 1, 6, 5], [0, 1, 6, 7], [0, 1, 8, 7]):
        filled(cache, 1)
        assert cache.positions.tolist() == expected


def test_several_tokens_put_the_ring_in_order_and_may_exceed_the_window() -> None:
    cache = filled(RotatingKVCache(5, sinks=1), 1, 1, 1, 1, 1, 1, 1)
    assert cache.positions.tolist() == [0, 5, 6, 3, 4]
    filled(cache, 6)
    assert cache.positions.tolist() == [0, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert (cache.live_len, cache.held_len, cache.offset) == (4, 10, 13)
    filled(cache, 1)  # cut, although a window of slots would hold it
    assert cache.positions.tolist() == [0, 10, 11, 12, 13] and cache.capacity == 5


def test_a_long_prompt_leaves_no_memory_behind() -> None:
    cache = filled(RotatingKVCache(8), 1000)
    assert cache.capacity == 1000
    filled(cache, 2)
    assert cache.capacity == 9
    cache = RotatingKVCache(8)
    long = mx.ones((1, 2, 3000, 64))
    mx.eval(cache.update_and_fetch(long, -long))
    del long
    before, active = cache.nbytes, mx.get_active_memory()
    mx.eval(cache.update_and_fetch(mx.ones((1, 2, 1, 64)), mx.ones((1, 2, 1, 64))))
    assert cache.nbytes < before / 300
    assert active - mx.get_active_memory() > 0.9 * before, "the old buffer is still alive"
    cache = filled(RotatingKVCache(300), 1)
    assert cache.capacity == 256
    filled(cache, *[1] * 299)
    assert cache.capacity == 300 == cache.held_len  # not 512: the window bounds it


@pytest.mark.parametrize("cut", [[13], [1] * 13, [4, 9], [9, 1, 1, 1, 1], [2, 2, 2, 2, 5]])
def test_who_sees_whom_does_not_depend_on_the_cuts(cut: list[int]) -> None:
    window, sinks = 5, 2
    cache, seen = RotatingKVCache(window, sinks), {}
    for n in cut:
        at, keys = cache.offset, cache.key_positions(n)
        mask = chunk_mask(n, cache)
        for row in range(n):
            shown = keys if mask is None else keys[mx.array(np.flatnonzero(np.array(mask[row])))]
            seen[at + row] = sorted(shown.tolist())
        filled(cache, n)
    assert seen == {q: [p for p in range(q + 1) if p < sinks or p > q - (window - sinks)] for q in range(13)}


def test_a_rollback_is_allowed_while_what_it_needs_is_held() -> None:
    grown = filled(RotatingKVCache(6), 5)
    assert grown.rollback(3) == 3 and grown.positions.tolist() == [0, 1]
    ring = filled(RotatingKVCache(6), *[1] * 9)  # holds 3..8
    assert ring.rollback(0) == 0 and ring.positions.tolist() == [6, 7, 8, 3, 4, 5]
    with pytest.raises(CannotTrim, match="roll back 2 tokens to position 7: 1 of the 5 keys that it sees are gone"):
        ring.rollback(2)
    assert ring.rollback(1) == 1 and ring.positions.tolist() == [3, 4, 5, 6, 7]
    with pytest.raises(CannotTrim):
        ring.rollback(1)
    assert ring.rollback(8) == 8 and (ring.offset, ring.held_len) == (0, 0)  # a fresh sequence needs nothing
    chunk = filled(RotatingKVCache(6), 3, 10)  # 0..12 are all still there
    assert chunk.held_len == 13 and chunk.rollback(6) == 6 and chunk.offset == 7


@both_storages
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("turned", range(7, 12))
def test_a_rollback_in_a_turned_ring_moves_the_rows_in_order(storage: Storage, sinks: int, turned: int) -> None:
    model = RingModel(6, sinks, storage)
    for _ in range(turned):
        model.append(1)
    model.rollback(1)
    model.check()
    assert model.offset == turned - 1 and model.slots == sorted(model.slots)
    for n in (1, 1, 2, 1):
        model.append(n)
        model.check()


def test_a_rollback_may_reach_into_the_sinks() -> None:
    cache = filled(RotatingKVCache(4, sinks=2), *[1] * 9)
    with pytest.raises(CannotTrim):
        cache.rollback(5)
    assert cache.rollback(8) == 8 and cache.positions.tolist() == [0]
    filled(cache, 4)
    assert cache.positions.tolist() == [0, 1, 2, 3, 4]


def test_a_front_trim_goes_by_position() -> None:
    cache, dense = filled(RotatingKVCache(4), *[1] * 10), filled(KVCache(), 10)  # 6..9 are held
    for n, held in ((5, [6, 7, 8, 9]), (2, [7, 8, 9])):
        assert cache.trim_front(n) == dense.trim_front(n) == n
        assert sorted(cache.positions.tolist()) == held and cache.live_start == dense.live_start
    mask = chunk_mask(2, cache)
    assert mask is not None and mask.shape == (2, 5)
    assert cache.trim_front(99) == 3 and (cache.live_start, cache.offset, cache.capacity) == (10, 10, 0)
    assert cache.update_and_fetch(mx.ones((2, 3, 1, 4)), mx.ones((2, 3, 1, 4)))[0].shape == (2, 3, 1, 4)


@pytest.mark.parametrize(("sinks", "keep"), [(2, 0), (2, 1), (0, 1)])
def test_no_front_trim_with_sinks(sinks: int, keep: int) -> None:
    cache = filled(RotatingKVCache(4, sinks), 7)
    was = told(cache)
    for trim in (cache.trim_front, cache.check_trim_front):
        with pytest.raises(CannotTrim, match=f"{sinks} sinks, keeping {keep}"):
            trim(3, keep)
    assert cache.trim_front(0, keep) == 0 == cache.rollback(0) and told(cache) == was


def test_bad_arguments_are_refused_and_change_nothing() -> None:
    for arguments, match in (((0,), "window 0"), ((3, 3), "sinks 3"), ((3, -1), "sinks -1"), ((3, 0, "int4"), "int4")):
        with pytest.raises(ValueError, match=match):
            RotatingKVCache(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunk 0"):
        VisibilityRule(chunk=0)
    cache = filled(RotatingKVCache(3), 4)
    was = told(cache)
    refused: list[Any] = [
        lambda: cache.trim_front(-1),
        lambda: cache.trim_front(1, keep=-1),
        lambda: cache.rollback(-1),
        lambda: cache.update_and_fetch(rows(2), rows(3)),
        lambda: cache.update_and_fetch(mx.ones((1, 1, 2, 3)), rows(2)),
        lambda: cache.update_and_fetch(mx.ones((1, 2)), rows(1)),
    ]
    for act in refused:
        with pytest.raises(ValueError, match=r"must|disagree|buffers"):
            act()
    assert told(cache) == was


def test_state_keeps_the_ring_and_a_wrong_one_is_refused() -> None:
    cache = filled(RotatingKVCache(4, 1), *[1] * 6)
    arrays, metadata = cache.state()
    assert metadata["kind"] == "rotating" and metadata["held"] == [[0, 1], [4, 6], [3, 4]]
    again = RotatingKVCache.from_state(arrays, metadata)
    for one in (cache, again):
        filled(one, 1)
    assert told(again) == told(cache)
    with pytest.raises(ValueError, match="keys are missing"):
        RotatingKVCache.from_state(arrays, metadata | {"window": 9})
    with pytest.raises(ValueError, match="4 keys below 5"):
        RotatingKVCache.from_state(arrays, metadata | {"offset": 5})
    with pytest.raises(ValueError, match="of \\[4\\] slots for 3 keys"):
        RotatingKVCache.from_state(arrays, metadata | {"held": [[0, 1], [4, 6]]})


def test_a_window_of_the_layer_counts_beside_the_rule() -> None:
    cache = filled(RotatingKVCache(6, 1), *[1] * 9)  # the next sees 0 5 6 7 8, in a ring
    mask = chunk_mask(1, cache, window=4)
    assert mask is not None
    shown = [key for key, here in zip(cache.key_positions(1).tolist(), mask[0].tolist(), strict=True) if here]
    assert sorted(shown) == [6, 7, 8, 9] and chunk_mask(1, cache, window=2**40) is None
    assert chunk_mask(1, filled(RotatingKVCache(4), *[1] * 9), window=4) is None


def test_the_offset_policy_still_takes_its_width_from_the_offset() -> None:
    cache = filled(RotatingKVCache(4), *[1] * 9)
    live, wrong = chunk_mask(3, cache), chunk_mask(3, cache, "offset")
    assert live is not None and wrong is not None and (live.shape, wrong.shape) == ((3, 6), (3, 12))
    assert wrong.tolist() == [[q - 4 < k <= q for k in range(12)] for q in (9, 10, 11)]
    assert chunk_mask(1, cache, "offset") is None
    few = filled(RotatingKVCache(4), 3)  # nothing is gone yet: the policies agree
    assert mx.array_equal(chunk_mask(3, few), chunk_mask(3, few, "offset"))


@both_storages
@pytest.mark.parametrize("turned", [0, 1, 2, 5, 40, 299])
@pytest.mark.parametrize("left", [1, 2, 5, 40, 299])
def test_a_front_trim_leaves_buffers_of_the_least_capacity(storage: Storage, turned: int, left: int) -> None:
    """Wherever the keys that are left stand on the ring: also where they are its first slots, in order."""
    cache = filled(RotatingKVCache(300, 0, storage), 299, *[1] * (1 + turned))
    cache.trim_front(cache.offset - cache.live_start - left)
    assert cache.live_len == left
    assert [side.capacity for side in (cache._keys, cache._values) if side] == [256 if left <= 256 else 300] * 2
