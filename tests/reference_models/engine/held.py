"""What a cache must hold, in NumPy: positions by slot, and the row that each position was written with last."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import strategies as st

from reference_models.engine import CannotTrim, KVCache, Storage, chunk_mask
from reference_models.engine.storage import decode, encode

Floats = npt.NDArray[np.float32]
Sees = Callable[[int, int], bool]
B, HK, DK, HV, DV = 2, 1, 4, 3, 2


def fresh_rows(first: int, n: int, heads: int, dim: int) -> Floats:
    """n rows [B, heads, n, dim] that no other ``first`` repeats; neighbours differ in magnitude, so that a scale of
    another row is far off."""
    rng = np.random.default_rng([first, heads])
    sizes = 10.0 ** ((np.arange(first, first + n) % 7) - 3.0)
    rows = rng.uniform(0.5, 1.0, (B, heads, n, dim)) * rng.choice([-1, 1], (B, heads, n, dim))
    return np.asarray(rows * sizes[:, None], dtype=np.float32)


def error(storage: Storage, rows: Floats) -> npt.NDArray[np.float64]:
    """What quantisation may cost. int8: half a step, plus what the rounding of the fp16 scale (half an ulp) can clip
    away; affine: a step."""
    wide = rows.astype(np.float64)
    if storage == "int8":
        exact = np.abs(wide).max(axis=-1, keepdims=True) / 127
        stored = exact.astype(np.float16).astype(np.float64)
        return np.asarray((stored / 2 + 127 * np.maximum(exact - stored, 0)) * 1.001)
    groups = wide.reshape(*rows.shape[:-1], -1, 32)
    steps = np.ptp(groups, axis=-1, keepdims=True) / {"affine8": 255, "affine4": 15}[storage]
    return np.asarray(np.broadcast_to(steps * 1.001, groups.shape).reshape(rows.shape))


def bytes_per_slot(storage: Storage, dims: tuple[int, int]) -> int:
    each = {
        "rows": lambda d: 4 * d,
        "int8": lambda d: d + 2,
        "affine8": lambda d: d + d // 4,
        "affine4": lambda d: d // 2 + d // 4,
    }[storage]
    return B * (HK * each(dims[0]) + HV * each(dims[1]))


class HeldModel:
    """Beside a cache: plain lists, and a check of all that can be seen.

    ``slots``: positions in slot order. ``rows``: of every position, keys and values as they were written last.
    ``sees(q, p)``: the rule, for ``p <= q``. Subclasses say where an append puts its tokens.
    """

    def __init__(self, cache: KVCache, sees: Sees, dims: tuple[int, int] | None = None) -> None:
        self.cache, self.sees = cache, sees
        self.dims = dims or ((32, 64) if cache.storage.startswith("affine") else (DK, DV))
        self.slots: list[int] = []
        self.rows: dict[int, tuple[Floats, Floats]] = {}
        self.offset = self.start = self.written = 0

    # To be said by a kind of cache: this base is for none in particular.

    def placed(self, n: int) -> list[int]:
        """Positions in slot order after an append of n tokens."""
        raise NotImplementedError

    def capacity_bound(self) -> int:
        """Slots that may be allocated now."""
        raise NotImplementedError

    # What can happen.

    def append(self, n: int) -> None:
        new = list(range(self.offset, self.offset + n))
        keys, values = fresh_rows(self.written, n, HK, self.dims[0]), fresh_rows(self.written, n, HV, self.dims[1])
        self.written += n
        expected = self.placed(n)
        assert self.cache.key_positions(n).tolist() == expected
        assert len(expected) == self.cache.live_len + n
        self.check_mask(new, expected)
        for index, position in enumerate(new):
            self.rows[position] = keys[:, :, index], values[:, :, index]
        self.slots = expected
        self.offset += n
        got = self.cache.update_and_fetch(mx.array(keys), mx.array(values))
        self.check_rows(got)

    def check_mask(self, queries: list[int], keys: list[int]) -> None:
        """The mask shows of the keys returned just what the rule says, and no key that the rule shows is missing."""
        for query in queries:
            shown = {key for key in range(self.start, query + 1) if self.sees(query, key)}
            assert shown <= set(keys), "a visible key is gone"
        visible = [[key <= query and self.sees(query, key) for key in keys] for query in queries]
        mask = chunk_mask(len(queries), self.cache)
        if mask is None:
            assert len(queries) == 1 and all(visible[0])
        else:
            assert len(queries) > 1 and mask.tolist() == visible

    def trim(self, n: int) -> None:
        n = min(n, self.offset - self.start)
        assert self.cache.trim_front(n) == n
        self.start += n
        if n:
            self.slots = sorted(position for position in self.slots if position >= self.start)

    def rollback(self, n: int) -> None:
        target = self.offset - min(n, self.offset - self.start)
        needed = {key for key in range(self.start, target) if self.sees(target, key)}
        if not needed <= set(self.slots):
            before = told(self.cache)
            for refused in (self.cache.check_rollback, self.cache.rollback):
                with pytest.raises(CannotTrim, match=f"position {target}"):
                    refused(n)
            assert told(self.cache) == before
            return
        assert self.cache.rollback(n) == self.offset - target
        self.slots = [position for position in self.slots if position < target]
        if self.cache.positions.tolist() != self.slots:  # a ring is put in order when slots in its midst go
            self.slots.sort()
        self.offset = target

    def go_on_with_a_copy(self) -> None:
        source, self.cache = self.cache, self.cache.copy()
        source.trim_front(source.offset) if source.rule.sinks == 0 else source.rollback(source.offset)
        source.update_and_fetch(mx.full((B, HK, 3, self.dims[0]), 9e5), mx.full((B, HV, 3, self.dims[1]), 9e5))

    def go_through_state(self) -> None:
        arrays, metadata = self.cache.state()
        self.cache = type(self.cache).from_state(arrays, metadata)

    def quantise(self, storage: Storage) -> None:
        if self.cache.storage != "rows":
            return
        source, was = self.cache, told(self.cache)
        self.cache = source.to_storage(storage)
        assert told(source) == was and self.cache.capacity == source.capacity

    # What must hold.

    def check(self) -> None:
        cache = self.cache
        assert (cache.offset, cache.live_start, cache.held_len) == (self.offset, self.start, len(self.slots))
        assert cache.positions.tolist() == self.slots and cache.positions.dtype == mx.int32
        assert cache.live_len == sum(self.sees(self.offset, position) for position in self.slots)
        assert cache.capacity <= self.capacity_bound()
        assert cache.nbytes == cache.capacity * bytes_per_slot(cache.storage, self.dims)
        if self.slots:
            self.check_rows(cache.rows())

    def check_rows(self, got: tuple[Any, Any]) -> None:
        for side, read in enumerate(got):
            wanted = np.stack([self.rows[position][side] for position in self.slots], axis=2)
            assert read.shape == wanted.shape
            storage = self.cache.storage
            if storage != "rows":
                assert (np.abs(np.array(read, np.float64) - wanted) <= error(storage, wanted)).all()
                # A row is stored as if it were alone, so also to the bit, whatever was moved or added since.
                rows = mx.array(wanted)
                wanted = np.array(decode(storage, encode(storage, rows), rows.dtype))
            assert np.array(read).tobytes() == wanted.tobytes()


def told(cache: KVCache) -> tuple[Any, ...]:
    """All that can be seen of a cache, as values."""
    rows = [None if side is None or not cache.held_len else np.array(side).tobytes() for side in cache.rows()]
    return cache.storage, cache.offset, cache.live_start, cache.positions.tolist(), rows, cache.capacity


def programs(longest: int, trims: bool = True, quantises: bool = False) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    """Lists of (method, arguments). Single tokens come in rows, so that a ring turns."""
    counts = st.integers(0, longest)
    steps = [
        st.tuples(st.just("decode"), st.integers(1, longest)),
        st.tuples(st.just("append"), st.integers(1, longest)),
        st.tuples(st.just("rollback"), counts),
        st.tuples(st.sampled_from(("go_on_with_a_copy", "go_through_state"))),
    ]
    if trims:
        steps.insert(2, st.tuples(st.just("trim"), counts))
    if quantises:
        steps.append(st.tuples(st.just("quantise"), st.sampled_from(("int8", "affine8", "affine4"))))
    return st.lists(st.one_of(steps), min_size=1, max_size=10)


def run(model: HeldModel, program: list[tuple[Any, ...]]) -> None:
    for name, *arguments in program:
        if name == "decode":
            for _ in range(arguments[0]):
                model.append(1)
                model.check()
        else:
            getattr(model, name)(*arguments)
        model.check()
    model.append(1)
    model.append(3)
    model.check()
