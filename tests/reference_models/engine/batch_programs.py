"""Programs for batches of caches, and a model of what must come out: a list of rows, each a list of tokens.

A program is a list of operations whose numbers are drawn without knowing the batch; ``Twin`` folds them into range. It
applies each to the batch, to a solo ``KVCache`` per row and to a plain list per row, and compares after every one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import strategies as st

from reference_models.engine import BatchKVCache, KVCache, Storage

SHAPES = ((2, 4), (1, 6))  # (H, D) of keys and of values
GARBAGE = 1e4  # what stands in padding at the right: finite, as in a forward, and easily seen
WIDTH = 5  # numbers per operation: one for each row, repeated for larger batches

counts = st.lists(st.integers(0, 9) | st.integers(0, 300), min_size=WIDTH, max_size=WIDTH)
fresh = st.lists(st.tuples(st.integers(0, 9) | st.just(260), st.integers(0, 4), st.integers(0, 2)), max_size=3)
operations = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 4) | st.just(250)),
    st.tuples(st.just("append_padded"), st.lists(st.integers(0, 4), min_size=WIDTH, max_size=WIDTH)),
    st.tuples(st.just("filter"), st.lists(st.integers(0, 9), max_size=4)),
    st.tuples(st.just("extend"), fresh),
    st.tuples(st.just("trim_front"), counts, st.lists(st.integers(0, 4), min_size=WIDTH, max_size=WIDTH)),
    st.tuples(st.just("rollback"), counts),
    st.tuples(st.just("rollback"), st.integers(0, 5).map(lambda n: [n] * WIDTH)),
    st.tuples(st.just("extract_and_join")),
)
programs = st.tuples(st.sampled_from(("rows", "int8")), fresh, st.lists(operations, min_size=1, max_size=8))


@dataclass
class Alone:
    """One row as it must be: the engine's solo cache, and a list of ``(position, key, value)`` for its rows."""

    solo: KVCache
    tokens: list[tuple[int, Any, Any]] = field(default_factory=list)
    offset: int = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        if keys.shape[2] == 0:
            return
        self.solo.update_and_fetch(keys, values)
        for at in range(keys.shape[2]):
            self.tokens.append((self.offset, np.array(keys[0, :, at]), np.array(values[0, :, at])))
            self.offset += 1

    def copy(self) -> Alone:
        return Alone(self.solo.copy(), list(self.tokens), self.offset)


class Twin:
    """A batch and its rows alone, through the same history."""

    def __init__(self, storage: Storage, rows: Sequence[tuple[int, int, int]]) -> None:
        self.storage, self.made = storage, 0
        self.rows: list[Alone] = []
        self.batch = BatchKVCache(storage)
        self.extend(rows)

    def new_rows(self, batch: int, n: int) -> tuple[mx.array, mx.array]:
        """Keys and values that no other token has."""
        self.made += 1
        keys = mx.random.split(mx.random.key(self.made), 2)
        made = [mx.random.normal((batch, h, n, d), key=key) for (h, d), key in zip(SHAPES, keys, strict=True)]
        return made[0], made[1]

    def each(self, numbers: Sequence[int]) -> list[int]:
        """As many of the numbers as there are rows."""
        return [numbers[row % len(numbers)] for row in range(len(self.rows))]

    def apply(self, name: str, *arguments: Any) -> None:
        before = self.batch.offset
        told = before.tolist()
        getattr(self, name)(*arguments)
        self.check()
        assert before.tolist() == told, "offsets that were read before have changed"

    def append(self, n: int) -> None:
        if self.rows:
            self._forward([n] * len(self.rows), n)

    def append_padded(self, lengths: Sequence[int]) -> None:
        lengths = self.each(lengths)
        if any(lengths):
            self.batch.prepare(lengths)
            self._forward(lengths, max(lengths) + lengths[0] % 2)  # at times a column that is padding in every row

    def _forward(self, lengths: Sequence[int], n: int) -> None:
        keys, values = self.new_rows(len(self.rows), n)
        real = (mx.arange(n) < mx.array(lengths)[:, None])[:, None, :, None]
        keys, values = mx.where(real, keys, GARBAGE), mx.where(real, values, GARBAGE)
        slots = self.batch.slots
        paddings = [slots - len(row.tokens) for row in self.rows]
        fetched = self.batch.update_and_fetch(keys, values)
        assert self.batch.prepared is None
        for side, rows in enumerate(fetched):
            assert rows.shape == (len(self.rows), SHAPES[side][0], slots + n, SHAPES[side][1])
        for number, (row, length, padding) in enumerate(zip(self.rows, lengths, paddings, strict=True)):
            row.append(keys[number : number + 1, :, :length], values[number : number + 1, :, :length])
            if not row.tokens:
                continue
            for mine, theirs in zip(fetched, row.solo.rows(), strict=True):
                seen = mine[number : number + 1, :, padding : slots + length]
                assert np.array(seen).tobytes() == np.array(theirs).tobytes()

    def filter(self, rows: Sequence[int]) -> None:
        rows = [row % len(self.rows) for row in rows] if self.rows else []
        self.rows = [self.rows[row].copy() for row in rows]
        assert self.batch.filter(rows) == tuple(row.offset for row in self.rows)

    def extend(self, rows: Sequence[tuple[int, int, int]]) -> None:
        new = []
        for length, trim, keep in rows:
            alone = Alone(KVCache(self.storage))
            alone.append(*self.new_rows(1, length) if length else (mx.zeros((1, 2, 0, 4)), mx.zeros((1, 1, 0, 6))))
            self._trim(alone, trim, keep)
            new.append(alone)
        other = BatchKVCache.join([row.solo for row in new]) if new else BatchKVCache(self.storage)
        numbers = self.batch.extend(other)
        assert numbers == tuple(range(len(self.rows), len(self.rows) + len(new)))
        self.rows += new

    def trim_front(self, numbers: Sequence[int], keeps: Sequence[int]) -> None:
        numbers, keeps = self.each(numbers), self.each(keeps)
        removed = tuple(self._trim(*arguments) for arguments in zip(self.rows, numbers, keeps, strict=True))
        assert self.batch.trim_front(numbers, keeps) == removed

    def _trim(self, row: Alone, n: int, keep: int) -> int:
        removed = min(n, len(row.tokens))
        keep = min(keep, len(row.tokens) - removed)
        del row.tokens[keep : keep + removed]
        assert row.solo.trim_front(n, keep) == removed
        return removed

    def rollback(self, numbers: Sequence[int]) -> None:
        numbers = self.each(numbers)
        removed = tuple(min(n, len(row.tokens)) for n, row in zip(numbers, self.rows, strict=True))
        for row, n in zip(self.rows, removed, strict=True):
            row.solo.rollback(n)
            del row.tokens[len(row.tokens) - n :]
            row.offset -= n
        assert self.batch.rollback(numbers) == removed

    def extract_and_join(self) -> None:
        if self.rows:
            self.batch = BatchKVCache.join([self.batch.extract(row) for row in range(len(self.rows))])

    def check(self) -> None:
        batch, rows = self.batch, self.rows
        live = [len(row.tokens) for row in rows]
        slots = max(live, default=0)
        assert (batch.batch, batch.slots, batch.live_len) == (len(rows), slots, tuple(live))
        assert batch.offsets == tuple(row.offset for row in rows)
        assert batch.offset.dtype == mx.int32 and batch.offset.tolist() == [[row.offset] for row in rows]
        assert batch.live_start == tuple(row.solo.live_start for row in rows)
        assert batch.padding == tuple(slots - n for n in live)
        assert batch.slot_positions.tolist() == [
            [-1] * (slots - len(row.tokens)) + [position for position, _, _ in row.tokens] for row in rows
        ]
        assert batch.capacity % KVCache.GROWTH == 0 and slots <= batch.capacity
        for number, row in enumerate(rows):
            self._check_row(number, row)

    def _check_row(self, number: int, row: Alone) -> None:
        live, padding = len(row.tokens), self.batch.slots - len(row.tokens)
        assert self.batch.positions(number).tolist() == row.solo.positions.tolist()
        one = self.batch.extract(number)
        assert (one.storage, one.offset, one.live_start) == (self.storage, row.offset, row.solo.live_start)
        assert one.positions.tolist() == [position for position, _, _ in row.tokens]
        assert one.capacity == -(-live // KVCache.GROWTH) * KVCache.GROWTH
        if not live:
            assert one.nbytes == 0
            return
        for side, (mine, theirs, extracted) in enumerate(
            zip(self.batch.rows(), row.solo.rows(), one.rows(), strict=True)
        ):
            assert mine is not None and theirs is not None and extracted is not None
            expected = np.array(theirs).tobytes()
            assert np.array(mine[number : number + 1, :, padding:]).tobytes() == expected
            assert np.array(extracted).tobytes() == expected
            assert not np.array(mine[number, :, :padding]).any(), "padding is not zero"
            if self.storage == "rows":
                listed = np.stack([token[1 + side] for token in row.tokens], axis=1)
                assert listed.tobytes() == expected


def run(program: tuple[Storage, Sequence[tuple[int, int, int]], Sequence[tuple[Any, ...]]]) -> None:
    """Apply a program; AssertionError where the batch is not what its rows are alone."""
    storage, rows, steps = program
    twin = Twin(storage, rows)
    twin.check()
    for name, *arguments in steps:
        twin.apply(name, *arguments)
