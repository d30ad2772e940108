"""What KVCache refuses, and that a refused call changes nothing."""

import mlx.core as mx
import pytest

from reference_models.engine import KVCache, Storage

STORAGES: tuple[Storage, ...] = ("rows", "int8")
both_storages = pytest.mark.parametrize("storage", STORAGES)


@both_storages
def test_negative_numbers_are_refused(storage: Storage) -> None:
    cache = KVCache(storage)
    for call in (cache.trim_front, cache.rollback):
        with pytest.raises(ValueError, match="-1"):
            call(-1)
    for n in (0, 1):
        with pytest.raises(ValueError, match="keep -2"):
            cache.trim_front(n, keep=-2)


@both_storages
@pytest.mark.parametrize(
    ("keys", "values", "dtype", "message"),
    [
        ((2, 1, 0, 4), (2, 3, 0, 2), mx.float32, "empty axis"),
        ((2, 1, 3, 4), (2, 3, 2, 2), mx.float32, "n=3.*n=2"),
        ((1, 1, 3, 4), (2, 3, 3, 2), mx.float32, None),
        ((3, 1, 3, 4), (3, 3, 3, 2), mx.float32, r"\(3, 1, 4\), the buffers have \(2, 1, 4\)"),
        ((2, 2, 3, 4), (2, 3, 3, 2), mx.float32, r"\(2, 2, 4\), the buffers have \(2, 1, 4\)"),
        ((2, 1, 3, 4), (2, 3, 3, 5), mx.float32, r"\(2, 3, 5\), the buffers have \(2, 3, 2\)"),
        ((2, 1, 3, 4), (2, 3, 3, 2), mx.float16, "float16.*float32"),
        ((2, 1, 3, 4), (2, 3, 3, 2), mx.int32, "int32"),
        ((2, 3, 4), (2, 3, 2), mx.float32, "4 axes"),
    ],
)
def test_bad_appends_are_refused_and_change_nothing(
    storage: Storage, keys: tuple[int, ...], values: tuple[int, ...], dtype: mx.Dtype, message: str | None
) -> None:
    cache = KVCache(storage)
    # Multiples of 127 survive int8 exactly: their scales are whole numbers.
    first = 127 * mx.arange(1.0, 6.0)[:, None]
    keys_before, values_before = mx.broadcast_to(first, (2, 1, 5, 4)), mx.broadcast_to(first, (2, 3, 5, 2))
    cache.update_and_fetch(keys_before, values_before)
    with pytest.raises(ValueError, match=message):
        cache.update_and_fetch(mx.ones(keys, dtype), mx.ones(values, dtype))
    assert (cache.offset, cache.live_len) == (5, 5)
    got = cache.update_and_fetch(mx.zeros((2, 1, 1, 4)), mx.zeros((2, 3, 1, 2)))
    assert mx.array_equal(got[0][:, :, :5], keys_before) and mx.array_equal(got[1][:, :, :5], values_before)


def test_first_append_checks_that_keys_and_values_agree() -> None:
    cache = KVCache()
    with pytest.raises(ValueError, match=r"B=1.*B=2"):
        cache.update_and_fetch(mx.ones((1, 1, 3, 4)), mx.ones((2, 1, 3, 4)))
    assert (cache.offset, cache.capacity) == (0, 0)


def test_unknown_storage_is_refused() -> None:
    with pytest.raises(ValueError, match="int4"):
        KVCache("int4")  # type: ignore[arg-type]
