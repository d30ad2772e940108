"""KVCache against a plain list of rows."""

import copy

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import KVCache, Storage, chunk_mask

Floats = npt.NDArray[np.float32]
STORAGES: tuple[Storage, ...] = ("rows", "int8")
B, HK, DK, HV, DV = 2, 1, 4, 3, 2
both_storages = pytest.mark.parametrize("storage", STORAGES)


def fresh_rows(first: int, n: int, heads: int, dim: int) -> Floats:
    """n rows [B, heads, n, dim] that no other ``first`` repeats; neighbours differ in magnitude, so that a
    scale of another row is far off."""
    rng = np.random.default_rng([first, heads])
    sizes = 10.0 ** ((np.arange(first, first + n) % 7) - 3.0)
    rows = rng.uniform(0.5, 1.0, (B, heads, n, dim)) * rng.choice([-1, 1], (B, heads, n, dim))
    return np.asarray(rows * sizes[:, None], dtype=np.float32)


def tolerance(rows: Floats) -> Floats:
    """Half a quantisation step, plus what the rounding of the fp16 scale (half an ulp) can clip away."""
    exact = np.abs(rows).max(axis=-1, keepdims=True).astype(np.float64) / 127
    stored = exact.astype(np.float16).astype(np.float64)
    bound = np.where(stored > 0, stored / 2 + 127 * np.maximum(exact - stored, 0), exact * 127)
    return np.asarray(bound * 1.001, dtype=np.float32)


def assert_rows(got: mx.array, expected: Floats, storage: Storage) -> None:
    assert got.shape == expected.shape
    if storage == "rows":
        assert np.array(got).tobytes() == expected.tobytes()
    else:
        assert (np.abs(np.array(got) - expected) <= tolerance(expected)).all()


def held(cache: KVCache) -> tuple[mx.array, mx.array]:
    """What the cache holds: append one row, and take it back."""
    fetched = cache.update_and_fetch(mx.zeros((B, HK, 1, DK)), mx.zeros((B, HV, 1, DV)))
    cache.rollback(1)
    return fetched[0][:, :, :-1], fetched[1][:, :, :-1]


class ListModel:
    """The rows of a cache as Python lists, and the counters that must follow from them."""

    def __init__(self, storage: Storage) -> None:
        self.cache = KVCache(storage)
        self.keys: list[Floats] = []
        self.values: list[Floats] = []
        self.start = self.capacity = self.written = 0
        self.positions: list[int] = []

    def append(self, n: int) -> None:
        keys, values = fresh_rows(self.written, n, HK, DK), fresh_rows(self.written, n, HV, DV)
        self.written += n
        self.positions += range(self.start + len(self.keys), self.start + len(self.keys) + n)
        self.keys += [keys[:, :, i] for i in range(n)]
        self.values += [values[:, :, i] for i in range(n)]
        got = self.cache.update_and_fetch(mx.array(keys), mx.array(values))
        self.capacity = max(self.capacity, self.rounded())
        self.check(got)

    def trim(self, n: int, keep: int) -> None:
        live = len(self.keys)
        n = min(n, live)
        keep = min(keep, live - n)
        for rows in (self.keys, self.values, self.positions):
            del rows[keep : keep + n]
        self.start += n
        assert self.cache.trim_front(n, keep) == n
        if n > 0:
            self.capacity = self.rounded()

    def rollback(self, n: int) -> None:
        n = min(n, len(self.keys))
        del self.positions[len(self.keys) - n :]
        del self.keys[len(self.keys) - n :]
        del self.values[len(self.values) - n :]
        assert self.cache.rollback(n) == n

    def rounded(self) -> int:
        return (len(self.keys) + 255) // 256 * 256

    def check(self, got: tuple[mx.array, mx.array]) -> None:
        assert_rows(got[0], np.stack(self.keys, axis=2), self.cache.storage)
        assert_rows(got[1], np.stack(self.values, axis=2), self.cache.storage)

    def check_counters(self) -> None:
        cache, live = self.cache, len(self.keys)
        assert (cache.live_len, cache.seq_len, cache.live_start) == (live, live, self.start)
        assert cache.offset == self.start + live
        assert cache.positions.tolist() == self.positions and cache.positions.dtype == mx.int32
        assert cache.capacity == self.capacity
        per_slot = 4 * (HK * DK + HV * DV) if cache.storage == "rows" else HK * (DK + 2) + HV * (DV + 2)
        assert cache.nbytes == B * per_slot * self.capacity


counts = st.one_of(st.integers(0, 6), st.integers(0, 40), st.sampled_from([200, 255, 256, 257, 300]))
operations = st.one_of(
    st.tuples(st.just("append"), counts.map(lambda n: max(n, 1))),
    st.tuples(st.just("trim"), counts, st.integers(0, 8)),
    st.tuples(st.just("rollback"), counts),
)


@both_storages
@settings(max_examples=60, deadline=None, database=None)
@given(program=st.lists(operations, max_size=12))
def test_any_program_equals_the_list_model(storage: Storage, program: list[tuple[str, int, int]]) -> None:
    model = ListModel(storage)
    for name, *numbers in program:
        getattr(model, name)(*numbers)
        model.check_counters()
    model.append(1)
    model.check_counters()


@both_storages
@pytest.mark.parametrize("first", [1, 255, 256, 257, 511, 512, 513])
def test_growth_keeps_rows_and_takes_whole_quanta(storage: Storage, first: int) -> None:
    model = ListModel(storage)
    for n in (first, 1, 255, 1):
        model.append(n)
        model.check_counters()


@both_storages
@pytest.mark.parametrize(
    ("n", "keep", "removed", "left"),
    [
        (0, 0, 0, [0, 1, 2, 3, 4]),
        (0, 3, 0, [0, 1, 2, 3, 4]),
        (2, 0, 2, [2, 3, 4]),
        (2, 1, 2, [0, 3, 4]),
        (2, 3, 2, [0, 1, 2]),
        (2, 9, 2, [0, 1, 2]),
        (5, 0, 5, []),
        (5, 4, 5, []),
        (9, 2, 5, []),
    ],
)
def test_trim_front_clamps(storage: Storage, n: int, keep: int, removed: int, left: list[int]) -> None:
    keys, values = fresh_rows(0, 5, HK, DK), fresh_rows(0, 5, HV, DV)
    cache = KVCache(storage)
    cache.update_and_fetch(mx.array(keys), mx.array(values))
    assert cache.trim_front(n, keep) == removed
    assert (cache.offset, cache.live_start, cache.live_len) == (5, removed, len(left))
    got = held(cache)
    assert_rows(got[0], keys[:, :, left], storage)
    assert_rows(got[1], values[:, :, left], storage)


@both_storages
def test_trim_of_everything_drops_buffers_and_is_not_fresh(storage: Storage) -> None:
    cache = KVCache(storage)
    assert (cache.capacity, cache.nbytes, cache.offset) == (0, 0, 0)
    assert cache.trim_front(3) == 0 == cache.rollback(3)
    cache.update_and_fetch(mx.ones((1, 1, 7, 2)), mx.ones((1, 1, 7, 2)))
    assert cache.trim_front(7, keep=4) == 7
    assert (cache.offset, cache.live_start, cache.live_len) == (7, 7, 0)
    assert (cache.capacity, cache.nbytes) == (0, 0)
    assert cache.trim_front(1) == 0 == cache.rollback(1)
    # No buffers, so nothing binds the shape or the dtype.
    keys, _ = cache.update_and_fetch(mx.ones((2, 3, 2, 4), mx.float16), mx.ones((2, 1, 2, 6), mx.float16))
    assert (keys.shape, keys.dtype) == ((2, 3, 2, 4), mx.float16)
    assert (cache.offset, cache.live_start, cache.live_len) == (9, 7, 2)


@both_storages
def test_rollback_to_zero_keeps_the_buffers_and_accepts_appends(storage: Storage) -> None:
    model = ListModel(storage)
    model.append(10)
    model.trim(3, 2)
    model.rollback(50)
    model.check_counters()
    assert (model.cache.offset, model.cache.live_start, model.cache.capacity) == (3, 3, 256)
    assert model.cache.trim_front(1) == 0
    model.append(4)
    model.check_counters()
    assert model.cache.offset == 7


@both_storages
def test_trim_frees_memory(storage: Storage) -> None:
    cache = KVCache(storage)
    rows = mx.ones((1, 2, 3000, 64))
    mx.eval(cache.update_and_fetch(rows, rows))
    del rows
    before, active = cache.nbytes, mx.get_active_memory()
    cache.trim_front(2800, keep=4)
    assert (cache.live_len, cache.capacity) == (200, 256)
    assert cache.nbytes * 12 == before  # 3072 slots became 256
    freed = active - mx.get_active_memory()
    assert freed > 0.9 * (before - cache.nbytes), "the old buffer is still alive"


@both_storages
def test_returned_arrays_and_buffers_do_not_alias(storage: Storage) -> None:
    cache = KVCache(storage)
    # Multiples of 127 survive int8 exactly: their scales are whole numbers.
    ones, twos = mx.full((1, 1, 256, 2), 127.0), mx.full((1, 1, 256, 2), 254.0)
    full, _ = cache.update_and_fetch(ones, ones)  # exactly the capacity: the slice is the whole buffer
    cache.rollback(2)
    later, _ = cache.update_and_fetch(twos[:, :, :2], twos[:, :, :2])
    assert (np.array(full) == 127).all(), "an append changed an array returned earlier"
    later[:, :, 0] = 9
    ones[:, :, 1] = 9
    cache.rollback(2)
    again, _ = cache.update_and_fetch(twos[:, :, :1], twos[:, :, :1])
    expected = np.full((1, 1, 255, 2), 127.0)
    expected[:, :, 254] = 254
    assert np.array_equal(np.array(again), expected)


@both_storages
def test_deepcopy_is_an_independent_snapshot(storage: Storage) -> None:
    cache = KVCache(storage)
    keys, values = fresh_rows(0, 6, HK, DK), fresh_rows(0, 6, HV, DV)
    cache.update_and_fetch(mx.array(keys), mx.array(values))
    twin = copy.deepcopy(cache)
    cache.rollback(3)
    cache.update_and_fetch(mx.zeros((B, HK, 3, DK)), mx.zeros((B, HV, 3, DV)))
    cache.trim_front(2)
    assert (twin.offset, twin.live_start) == (6, 0)
    assert twin.positions.tolist() == list(range(6)) and cache.positions.tolist() == [2, 3, 4, 5]
    assert_rows(held(twin)[0], keys, storage)


@both_storages
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32])
def test_rows_come_back_in_their_dtype(storage: Storage, dtype: mx.Dtype) -> None:
    cache = KVCache(storage)
    rows = mx.array(fresh_rows(3, 5, 1, 8)).astype(dtype)
    for _ in range(2):
        keys, values = cache.update_and_fetch(rows, rows)
        assert keys.dtype == values.dtype == dtype
        cache.trim_front(1)
    if storage == "rows":
        assert mx.array_equal(keys[:, :, 4:], rows)
    else:
        exact, read = (np.array(x.astype(mx.float32)) for x in (rows, keys[:, :, 4:]))
        rounding = {mx.bfloat16: 2**-8, mx.float16: 2**-10, mx.float32: 0.0}[dtype]
        assert (np.abs(read - exact) <= tolerance(exact) + rounding * np.abs(exact)).all()


@both_storages
def test_regression_mask_after_trim(storage: Storage) -> None:
    """The bug that started the project: after a trim the offset mask is wider than the keys."""
    cache = KVCache(storage)
    cache.update_and_fetch(mx.ones((1, 2, 8, 4)), mx.ones((1, 2, 8, 4)))
    cache.trim_front(3)
    live, wrong = chunk_mask(4, cache, "live"), chunk_mask(4, cache, "offset")
    keys, values = cache.update_and_fetch(mx.ones((1, 2, 4, 4)), mx.ones((1, 2, 4, 4)))
    assert live is not None and wrong is not None
    assert keys.shape[2] == values.shape[2] == 9
    assert (live.shape, wrong.shape) == ((4, 9), (4, 12))
    scores = mx.ones((1, 2, 4, 4)) @ keys.swapaxes(-1, -2)
    assert mx.where(live, scores, 0).shape == (1, 2, 4, 9)
    with pytest.raises(ValueError, match="broadcast"):
        mx.where(wrong, scores, 0)
