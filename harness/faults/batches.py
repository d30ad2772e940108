"""Bugs of a batch of caches: who is where in it, behind how much padding, and who else a trim reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models.engine import BatchKVCache, BatchPool, KVCache, batch_cache
from reference_models.engine.pool import TrimReport

_KEEP = "batches_keep_their_rows"
_LENGTHS = "keys_equal_ledger_live_length"
_TRIMS = "trim_reports_what_it_removed"
_ROWS = "cached_rows_stay_what_they_were"

Plant = Callable[[], AbstractContextManager[None]]


def _sides(cache: BatchKVCache) -> list[Any]:
    return [side for side in (cache._keys, cache._values) if side is not None]


def _stacking(start: Callable[[int, int, int, int], int]) -> Plant:
    """Puts rows that come together elsewhere than at the right: ``start(slots, longest, offset, live)`` says at which
    slot, with the slots that all share, the largest offset, and what the row itself has."""

    @contextmanager
    def plant() -> Iterator[None]:
        original = BatchKVCache.__dict__["_stack"]

        def stack(cls: type[BatchKVCache], batches: Sequence[BatchKVCache]) -> BatchKVCache:
            whole: BatchKVCache = original.__func__(cls, batches)
            slots, longest = whole.slots, max(whole.offsets, default=0)
            for row, (offset, live) in enumerate(zip(whole.offsets, whole.held_len, strict=True)):
                if not live:
                    continue
                at = start(slots, longest, offset, live)
                for array in (array for side in _sides(whole) for array in side.arrays):
                    held = mx.array(array[row, :, slots - live : slots])
                    array[row, :, :slots] = 0
                    array[row, :, at : at + live] = held
            return whole

        setattr(BatchKVCache, "_stack", classmethod(stack))  # noqa: B010  # mypy knows better than to assign it
        try:
            yield
        finally:
            setattr(BatchKVCache, "_stack", original)  # noqa: B010

    return plant


def _padding_counts(original: Any) -> Any:
    def update_and_fetch(self: BatchKVCache, keys: mx.array, values: mx.array) -> Any:
        self.prepared = None
        return original(self, keys, values)

    return update_and_fetch


def _padding_stays(original: Any) -> Any:
    def update_and_fetch(self: BatchKVCache, keys: mx.array, values: mx.array) -> Any:
        lengths = self.prepared or (keys.shape[2],) * self.batch
        after = [row.appended(length) for row, length in zip(self._rows, lengths, strict=True)]
        self.prepared = None
        fetched = original(self, keys, values)
        self._rows = tuple(after)
        return fetched

    return update_and_fetch


def _keeps_the_slots(original: Any) -> Any:
    def keep(self: BatchKVCache, rows: Sequence[int]) -> tuple[int, ...]:
        self._rows = tuple(self._rows[row] for row in rows)
        for side in _sides(self):
            side.arrays = [array[mx.array(list(rows), dtype=mx.int32)] for array in side.arrays]
            side.bound = (len(rows), *side.bound[1:])
        return self.offsets

    return keep


def _keeps_the_next(original: Any) -> Any:
    def keep(self: BatchKVCache, rows: Sequence[int]) -> tuple[int, ...]:
        if 0 < len(rows) < self.batch:
            for side in _sides(self):
                side.arrays = [mx.roll(array, -1, 0) for array in side.arrays]
        kept: tuple[int, ...] = original(self, rows)
        return kept

    return keep


def _keeps_the_scales(original: Any) -> Any:
    def keep(self: BatchKVCache, rows: Sequence[int]) -> tuple[int, ...]:
        before = [side.arrays[-1] for side in _sides(self)]
        kept: tuple[int, ...] = original(self, rows)
        for side, scales in zip(_sides(self), before, strict=False):
            slots = self.slots
            side.arrays[-1][:, :, :slots] = scales[: len(rows), :, :slots]
        return kept

    return keep


def _is_int8(target: Any) -> bool:
    return bool(target.storage == "int8")


def _takes_the_next(original: Any) -> Any:
    def extract(self: BatchKVCache, row: int) -> KVCache:
        own: KVCache = original(self, row)
        start, end = self.padding[row], self.slots
        for mine, side in zip((own._keys, own._values), _sides(self), strict=False):
            for array, theirs in zip(mine.arrays if mine is not None else (), side.arrays, strict=False):
                array[:, :, : own.held_len] = theirs[(row + 1) % self.batch][None, :, start:end]
        return own

    return extract


def _takes_the_padding(original: Any) -> Any:
    def extract(self: BatchKVCache, row: int) -> KVCache:
        own: KVCache = original(self, row)
        arrays, metadata = own.state()
        padding = self.padding[row]
        if not arrays or not padding:
            return own
        arrays = {name: mx.pad(array, [(0, 0), (0, 0), (padding, 0), (0, 0)]) for name, array in arrays.items()}
        end = own.offset + padding
        held = [[end - own.held_len - padding, end]]
        return type(own).from_state(arrays, metadata | {"offset": end, "held": held})

    return extract


def _forgets_what_was_trimmed(original: Any) -> Any:
    def extract(self: BatchKVCache, row: int) -> KVCache:
        own: KVCache = original(self, row)
        own.offset, own.live_start = own.held_len, 0
        own._held = [range(own.offset)] if own.offset else []
        return own

    return extract


def _on_all_rows(original: Any) -> Any:
    def on_row(self: BatchPool, seq: int, n: int, act: Callable[[Any, list[int]], Any]) -> TrimReport:
        row = self._rows.index(seq)
        return TrimReport(n, tuple(act(cache, [n] * len(self._rows))[row] for cache in self._batch))

    return on_row


def _of_the_longest(original: Any) -> Any:
    def bounds(self: BatchPool, seq: int) -> tuple[tuple[int, int, int], ...]:
        told = [original(self, row) for row in (self._rows if seq in self._rows else (seq,))]
        return tuple(max(layer, key=lambda of: of[0] - of[1]) for layer in zip(*told, strict=True))

    return bounds


def _moves_the_shared_end(original: Any) -> Any:
    def rollback(self: BatchKVCache, counts: Sequence[int]) -> tuple[int, ...]:
        removed = tuple(min(n, row.tokens) for n, row in zip(counts, self._rows, strict=True))
        self._rows = tuple(row.rolled_back(n) for row, n in zip(self._rows, removed, strict=True))
        return removed

    return rollback


def _garbage_in_the_padding(original: Any) -> Any:
    def gathered(side: Any, rows: Sequence[int], kept: Sequence[Sequence[range]], slots: int) -> Any:
        moved = original(side, rows, kept, slots)
        for row, runs in enumerate(kept):
            moved.arrays[0][row, :, : slots - sum(map(len, runs))] = 1
        return moved

    return gathered


FAULTS: tuple[Fault, ...] = (
    Fault(
        "batch-joined-by-offset",
        "rows that join are aligned by their offsets, not by the number of keys that they hold",
        _KEEP,
        _stacking(lambda slots, longest, offset, live: min(longest - offset, slots - live)),
        "vllm-project/vllm-metal#117",
        layer="batch",
    ),
    Fault(
        "batch-joined-at-the-left",
        "rows that join start in the first slot, and the padding lies behind them",
        _KEEP,
        _stacking(lambda slots, longest, offset, live: 0),
        layer="batch",
    ),
    Fault(
        "batch-right-padding-is-kept",
        "what pads a short row at the right goes into the cache, and into its offset",
        _LENGTHS,
        replacing(BatchKVCache, "update_and_fetch", _padding_counts),
        source="ml-explore/mlx-lm#439",
        layer="batch",
    ),
    Fault(
        "batch-right-padding-stays-in-the-middle",
        "behind a ragged chunk rows are not aligned anew: offsets are right, and slots are not",
        _ROWS,
        replacing(BatchKVCache, "update_and_fetch", _padding_stays),
        source="ml-explore/mlx-lm#1821 (states not rolled row by row in the end)",
        layer="batch",
    ),
    Fault(
        "batch-filter-keeps-the-slots",
        "rows leave a batch, the padding that they alone needed stays, and nobody counts it",
        _KEEP,
        replacing(BatchKVCache, "filter", _keeps_the_slots),
        "Blaizzy/mlx-vlm#1889",
        layer="batch",
    ),
    Fault(
        "batch-filter-keeps-the-next-row",
        "when a row leaves, each of those that stay is given the keys of the row behind it",
        _KEEP,
        replacing(BatchKVCache, "filter", _keeps_the_next),
        source="ProjectDMX/DMI#67 (rows were taken for those of other requests)",
        layer="batch",
    ),
    Fault(
        "batch-filter-keeps-the-scales",
        "rows of an Int8 cache move up when one leaves, and their scales do not",
        _KEEP,
        replacing(BatchKVCache, "filter", _keeps_the_scales),
        source="Blaizzy/mlx-vlm#1889 (state per row that is not filtered with the rows)",
        shown_on=_is_int8,
        layer="batch",
    ),
    Fault(
        "batch-extract-takes-the-next-row",
        "who leaves a batch is given the lengths of its own row and the keys of the next one",
        _KEEP,
        replacing(BatchKVCache, "extract", _takes_the_next),
        source="tenstorrent/tt-metal#44746 (a user was given another's cache)",
        layer="batch",
    ),
    Fault(
        "batch-extract-takes-the-padding",
        "who leaves a batch takes the padding in front of its keys along, as keys",
        _LENGTHS,
        replacing(BatchKVCache, "extract", _takes_the_padding),
        "ml-explore/mlx-lm#1746",
        layer="batch",
    ),
    Fault(
        "batch-extract-forgets-live-start",
        "who leaves a batch stands at the number of its keys, whatever was trimmed before",
        _LENGTHS,
        replacing(BatchKVCache, "extract", _forgets_what_was_trimmed),
        layer="batch",
    ),
    Fault(
        "batch-trim-of-all-rows",
        "a front trim or a rollback of one row reaches every row of the batch",
        "sequences_are_isolated",
        replacing(BatchPool, "_on_row", _on_all_rows),
        "ml-explore/mlx-lm#873",
        layer="batch",
    ),
    Fault(
        "batch-bound-of-the-longest-row",
        "a bound on one row of a batch is compared with the longest of its rows, and takes too much of the others",
        _TRIMS,
        replacing(BatchPool, "bounds", _of_the_longest),
        layer="pool",
    ),
    Fault(
        "batch-rollback-moves-the-shared-end",
        "rows that lose different numbers of tokens keep their slots: rejected drafts stay, and others' keys go",
        _ROWS,
        replacing(BatchKVCache, "rollback", _moves_the_shared_end),
        "Blaizzy/mlx-vlm#1155",
        layer="batch",
    ),
)

VARIATIONS: tuple[Fault, ...] = (
    Fault(
        "batch-padding-of-ones",
        "padding holds numbers other than zero, which a mask hides as well",
        None,
        replacing(batch_cache, "gathered", _garbage_in_the_padding),
    ),
)
"""Of batches alone: nothing of a sequence by itself changes."""
