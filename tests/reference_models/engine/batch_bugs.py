"""Bugs to plant in a batch of caches, one at a time: each patches the engine until the ``MonkeyPatch`` is undone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest

from reference_models.engine import BatchKVCache, batch_cache, batch_moves
from reference_models.engine.batch_rows import BatchLengths, Row
from reference_models.engine.side import Side

Patch = pytest.MonkeyPatch


def offset_in_place(patch: Patch) -> None:
    """One array for the life of the cache, written to: whoever read it before the append sees it move."""

    def offset(self: Any) -> mx.array:
        now = mx.array([[row.offset] for row in self._rows], dtype=mx.int32).reshape(self.batch, 1)
        kept = self.__dict__.setdefault("kept", now)
        if kept.shape != now.shape:
            self.kept = now
        elif kept.size:
            kept[:] = now
        return self.kept

    patch.setattr(BatchLengths, "offset", property(offset))


def merge_by_offset(patch: Patch) -> None:
    """Rows are aligned as if nothing had ever been trimmed."""

    def padding(self: Any) -> tuple[int, ...]:
        return tuple(max(self.offsets) - row.offset for row in self._rows)

    patch.setattr(BatchLengths, "padding", property(padding))


def padding_counts(patch: Patch) -> None:
    """Padding at the right goes into the offset and stays."""
    original = BatchKVCache.update_and_fetch

    def update(self: Any, keys: mx.array, values: mx.array) -> Any:
        self.prepared = None
        return original(self, keys, values)

    patch.setattr(BatchKVCache, "update_and_fetch", update)


def filter_forgets_padding(patch: Patch) -> None:
    """Rows go, and the slots that they alone needed stay."""

    def forget(self: Any, rows: Sequence[int]) -> tuple[int, ...]:
        self._rows = tuple(self._rows[row] for row in rows)
        for side in (self._keys, self._values):
            if side is not None:
                side.arrays = [array[mx.array(list(rows), dtype=mx.int32)] for array in side.arrays]
                side.bound = (len(rows), *side.bound[1:])
        return tuple(self.offsets)

    patch.setattr(BatchKVCache, "filter", forget)


def extend_aligns_left(patch: Patch) -> None:
    """Rows of the shorter batch start where those of the longer one do."""

    def stacked(parts: Any, slots: int) -> Side | None:
        whole = batch_moves.stacked(parts, slots)
        at = 0
        for side, mine, rows in parts:
            if whole is not None and side is not None and mine:
                for array in whole.arrays:
                    live = mx.array(array[at : at + rows, :, slots - mine : slots])
                    array[at : at + rows, :, :slots] = 0
                    array[at : at + rows, :, :mine] = live
            at += rows
        return whole

    patch.setattr(batch_cache, "stacked", stacked)


def scales_stay(patch: Patch) -> None:
    """A move takes the int8 rows along, and leaves the scales."""

    def gathered(side: Side, rows: Any, kept: Any, slots: int) -> Side:
        moved = batch_moves.gathered(side, rows, kept, slots)
        if len(moved.arrays) > 1:
            moved.arrays[1][:, :, :slots] = side.arrays[1][mx.array(list(rows)), :, :slots]
        return moved

    patch.setattr(batch_cache, "gathered", gathered)


def padding_is_left_as_it_was(patch: Patch) -> None:
    """Slots that a row lost keep what they held; it would do until something there is not finite."""

    def gathered(side: Side, rows: Any, kept: Any, slots: int) -> Side:
        moved = batch_moves.gathered(side, rows, kept, slots)
        for row, runs in enumerate(kept):
            moved.arrays[0][row, :, : slots - sum(map(len, runs))] = 1
        return moved

    patch.setattr(batch_cache, "gathered", gathered)


def sinks_keep_contiguous_positions(patch: Patch) -> None:
    """Slot i is taken for position ``live_start + i``, also behind kept sinks."""
    original = Row.trimmed

    def trimmed(self: Row, n: int, keep: int) -> Any:
        row, slots = original(self, n, keep)
        return Row(row.offset, row.live_start, (range(row.live_start, row.offset),)), slots

    patch.setattr(Row, "trimmed", trimmed)


def rollback_moves_the_shared_end(patch: Patch) -> None:
    """Rows that lose different counts are not aligned anew."""

    def rollback(self: Any, counts: Sequence[int]) -> tuple[int, ...]:
        removed = tuple(map(min, counts, self.live_len))
        self._rows = tuple(row.rolled_back(n) for row, n in zip(self._rows, removed, strict=True))
        return removed

    patch.setattr(BatchKVCache, "rollback", rollback)


BUGS: tuple[Callable[[Patch], None], ...] = (
    offset_in_place,
    merge_by_offset,
    padding_counts,
    filter_forgets_padding,
    extend_aligns_left,
    scales_stay,
    padding_is_left_as_it_was,
    sinks_keep_contiguous_positions,
    rollback_moves_the_shared_end,
)
