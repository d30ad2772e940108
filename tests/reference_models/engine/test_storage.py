"""Every storage under every kind of cache, what it costs, and the way from rows to it in mid-sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models.engine import KVCache, NoCache, RotatingKVCache, Storage, largest_error, load_caches, save_caches
from reference_models.engine.storage import decode, dim_of, encode, layout
from tests.reference_models.engine.held import HeldModel, programs, run, told
from tests.reference_models.engine.test_chunked import ChunkModel
from tests.reference_models.engine.test_rotating import RingModel

STORAGES: tuple[Storage, ...] = get_args(Storage)
QUANTISED = STORAGES[1:]
AFFINE = STORAGES[2:]
DIMS = (32, 64)
DTYPES = (mx.float32, mx.float16, mx.bfloat16)


class DenseModel(HeldModel):
    def __init__(self, storage: Storage = "rows", dims: tuple[int, int] | None = None) -> None:
        super().__init__(KVCache(storage), lambda q, p: True, dims)

    def placed(self, n: int) -> list[int]:
        return [*self.slots, *range(self.offset, self.offset + n)]

    def capacity_bound(self) -> int:
        return (self.written + 255) // 256 * 256


MODELS = {
    "dense": lambda storage: DenseModel(storage, DIMS),
    "rotating": lambda storage: RingModel(5, 0, storage, DIMS),
    "sinks": lambda storage: RingModel(5, 2, storage, DIMS),
    "chunked": lambda storage: ChunkModel(4, storage, DIMS),
}


@pytest.mark.parametrize("storage", AFFINE)
@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_any_program_on_affine_rows(kind: str, storage: Storage, data: st.DataObject) -> None:
    run(MODELS[kind](storage), data.draw(programs(9, trims=kind != "sinks")))


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_rows_become_quantised_in_mid_sequence(kind: str, data: st.DataObject) -> None:
    run(MODELS[kind]("rows"), data.draw(programs(9, trims=kind != "sinks", quantises=True)))


@pytest.mark.parametrize("storage", QUANTISED)
def test_growth_and_trims_behind_the_change(storage: Storage) -> None:
    model = DenseModel("rows", DIMS)
    for name, *arguments in (
        ("append", 255),
        ("trim", 3),
        ("quantise", storage),
        ("append", 10),
        ("rollback", 4),
        ("append", 300),
        ("trim", 260),
        ("go_through_state",),
        ("append", 1),
    ):
        getattr(model, name)(*arguments)
        model.check()


@pytest.mark.parametrize("storage", QUANTISED)
def test_what_was_quantised_later_is_what_was_quantised_at_once(storage: Storage) -> None:
    rows = mx.random.normal((2, 3, 9, 64), key=mx.random.key(3))
    late, early = KVCache(), KVCache(storage)
    for cache in (late, early):
        cache.update_and_fetch(rows, -rows)
        cache.trim_front(2, keep=1)
    late = late.to_storage(storage)
    assert told(late) == told(early) and late.positions.tolist() == [0, 3, 4, 5, 6, 7, 8]
    empty = KVCache().to_storage(storage)
    assert (empty.storage, empty.held_len, empty.capacity) == (storage, 0, 0)


@pytest.mark.parametrize("storage", QUANTISED)
def test_the_memory_of_the_rows_is_given_back(storage: Storage) -> None:
    rows = mx.ones((1, 2, 4096, 64))
    cache = KVCache()
    mx.eval(cache.update_and_fetch(rows, -rows))
    del rows
    before, active = cache.nbytes, mx.get_active_memory()
    cache = cache.to_storage(storage)
    assert cache.nbytes < 0.32 * before
    assert active - mx.get_active_memory() > 0.9 * (before - cache.nbytes), "the rows are still alive"


def test_only_rows_are_quantised_and_only_to_something() -> None:
    rows = mx.ones((1, 1, 2, 32))
    for source in STORAGES:
        cache = KVCache(source)
        cache.update_and_fetch(rows, rows)
        was = told(cache)
        for target in STORAGES:
            if source != "rows" or target == "rows":
                with pytest.raises(ValueError, match=f"turn {source} into {target}"):
                    cache.to_storage(target)
        with pytest.raises(ValueError, match="unknown storage 'int4'"):
            cache.to_storage("int4")  # type: ignore[arg-type]
        assert told(cache) == was


@pytest.mark.parametrize("storage", AFFINE)
def test_a_dim_that_the_groups_do_not_divide_is_refused_before_anything_changes(storage: Storage) -> None:
    good, odd = mx.ones((1, 1, 3, 32)), mx.ones((1, 1, 3, 48))
    match = f"have D=48: {storage} needs a multiple of its group size 32"
    for keys, values, name in ((odd, good, "keys"), (good, odd, "values")):
        for cache in (KVCache(storage), RotatingKVCache(2, storage=storage), NoCache(storage=storage)):
            with pytest.raises(ValueError, match=f"{name} {match}"):
                cache.update_and_fetch(keys, values)
            assert cache.offset == 0 and (isinstance(cache, NoCache) or cache.capacity == 0)
        cache = KVCache()
        cache.update_and_fetch(keys, values)
        was = told(cache)
        with pytest.raises(ValueError, match=f"{name} {match}"):
            cache.to_storage(storage)
        assert told(cache) == was


@pytest.mark.parametrize("storage", QUANTISED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_file_and_a_witness_without_cache_keep_the_storage(tmp_path: Path, storage: Storage, dtype: mx.Dtype) -> None:
    rows = mx.random.normal((1, 2, 5, 32), key=mx.random.key(1)).astype(dtype)
    cache = KVCache(storage)
    cache.update_and_fetch(rows, -rows)
    save_caches(tmp_path / "c.safetensors", [cache])
    (again,) = load_caches(tmp_path / "c.safetensors")
    for one, other in zip(again.rows(), cache.rows(), strict=True):
        assert one is not None and other is not None and one.dtype == dtype and mx.array_equal(one, other)
    assert (again.storage, again.bytes_per_slot) == (storage, cache.bytes_per_slot)
    for one, other in zip(NoCache(storage=storage).update_and_fetch(rows, -rows), cache.rows(), strict=True):
        assert mx.array_equal(one, other)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_layout_is_what_is_made(storage: Storage) -> None:
    for dtype in DTYPES:
        made = encode(storage, mx.ones((1, 2, 3, 96), dtype))
        assert [(array.shape[3], array.dtype) for array in made] == layout(storage, 96, dtype)
        assert dim_of(storage, made[0].shape[3]) == 96
        assert decode(storage, made, dtype).dtype == dtype
        none = encode(storage, mx.ones((1, 2, 0, 96), dtype))
        assert [(array.shape[2:], array.dtype) for array in none] == [
            ((0, w), d) for w, d in layout(storage, 96, dtype)
        ]
        assert decode(storage, none, dtype).shape == (1, 2, 0, 96)


@pytest.mark.parametrize("storage", QUANTISED)
def test_buffers_without_a_token_in_use(storage: Storage) -> None:
    """Behind a rollback of everything the buffers are still there."""
    cache = KVCache()
    cache.update_and_fetch(mx.ones((1, 1, 3, 32)), mx.ones((1, 1, 3, 32)))
    cache.rollback(3)
    later = cache.to_storage(storage)
    keys, _ = later.rows()
    assert keys is not None and keys.shape == (1, 1, 0, 32)
    assert later.update_and_fetch(mx.ones((1, 1, 1, 32)), mx.ones((1, 1, 1, 32)))[0].shape == (1, 1, 1, 32)


@st.composite
def groups(draw: st.DrawFn) -> Any:
    """64 numbers of many shapes: spread, far from zero, nearly equal, with two ends alone, zeros."""
    numbers = st.floats(-1, 1, width=32)
    row = draw(
        st.one_of(st.lists(numbers, min_size=1, max_size=5), st.sampled_from([[0.0], [1.0, -1.0], [1.0, -0.9375]]))
    )
    row = np.resize(np.array(row), 64) + draw(st.sampled_from((0.0, 0.0, 3.0, -40.0)))
    return (row * 2.0 ** draw(st.integers(-30, 8))).astype(np.float32).reshape(1, 1, 1, 64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("storage", QUANTISED)
@settings(max_examples=100, deadline=None)
@given(groups())
def test_no_number_moves_further_than_stated(storage: Storage, dtype: mx.Dtype, drawn: Any) -> None:
    rows = mx.array(drawn).astype(dtype)
    bound = largest_error(storage, rows)
    assert bound.shape == rows.shape and bound.dtype == mx.float32
    read = decode(storage, encode(storage, rows), dtype)
    moved = np.abs(np.array(read.astype(mx.float32), np.float64) - np.array(rows.astype(mx.float32), np.float64))
    assert (moved <= np.array(bound)).all()


@pytest.mark.parametrize("storage", QUANTISED)
def test_the_bound_is_near_what_happens(storage: Storage) -> None:
    """Inside half a step, at one end up to a whole one: otherwise a wrong scale could hide under it."""
    rows = mx.random.uniform(-1, 1, (1, 1, 2000, 64), key=mx.random.key(5))
    moved = mx.abs(decode(storage, encode(storage, rows), mx.float32) - rows)
    bound = largest_error(storage, rows)
    assert mx.max(moved / bound).item() > 0.99 and mx.mean(moved / bound).item() > 0.4
    assert mx.all(largest_error("rows", rows) == 0).item()


@pytest.mark.parametrize("bits", [4, 8])
def test_half_a_step_would_be_too_little(bits: int) -> None:
    """MLX lets 0 fall on a step and counts from the end of larger magnitude; the other end may lie behind the last."""
    storage: Storage = "affine4" if bits == 4 else "affine8"
    step = 2 / (2**bits - 1)
    rows = mx.zeros((1, 1, 400, 32))
    rows[..., 0], rows[..., 1] = -1.0, mx.linspace(0.8, 1.0, 400)
    moved = mx.abs(decode(storage, encode(storage, rows), mx.float32) - rows)
    assert mx.max(moved).item() > 0.6 * step and mx.all(moved <= largest_error(storage, rows)).item()
