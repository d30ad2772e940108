"""Bugs of batches of caches that forget by a rule, or lie in blocks; only a target with such caches shows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import mlx.core as mx

from harness.faults.blocks import miscounting
from harness.faults.model import Fault
from harness.faults.patching import Patch, both, replacing
from reference_models.engine import BatchKVCache, BatchPagedKVCache, PagedKVCache, VisibilityRule
from reference_models.engine.batch_rows import BatchLengths, Row
from reference_models.engine.runs import found

_KEEP = "batches_keep_their_rows"
_CONTENT = "mask_shows_exactly_the_visible_set"
_REPORTS = "trim_reports_what_it_removed"
_ROWS = "cached_rows_stay_what_they_were"

Plant = Callable[[], AbstractContextManager[None]]


def _named(*kinds: str) -> Callable[[Any], bool]:
    return lambda target: target.storage.startswith(kinds)


_rotating, _chunked, _paged = _named("rotating"), _named("chunked"), _named("paged")
_ruled = _named("rotating", "chunked")


def _has_sinks(target: Any) -> bool:
    return any(rule is not None and rule.sinks for rule in target.rules)


def _stacking(change: Callable[[BatchKVCache], None]) -> Plant:
    """Does something to rows that have come together."""

    def make(original: Any) -> Any:
        def stack(cls: type[BatchKVCache], batches: Sequence[BatchKVCache]) -> BatchKVCache:
            whole: BatchKVCache = original(batches)
            change(whole)
            return whole

        return classmethod(stack)

    return _replacing_classmethod(BatchKVCache, "_stack", make)


def _replacing_classmethod(owner: Any, name: str, make: Patch) -> Plant:
    @contextmanager
    def plant() -> Iterator[None]:
        own, bound = vars(owner)[name], getattr(owner, name)
        setattr(owner, name, make(bound))
        try:
            yield
        finally:
            setattr(owner, name, own)

    return plant


def _as_many_as_the_offset(whole: BatchKVCache) -> None:
    """Every row that has forgotten something gets as many slots as it has processed tokens."""
    for row, (offset, held) in enumerate(zip(whole.offsets, whole.held_len, strict=True)):
        for side in whole.row(row) if held < offset else ():
            if side is not None:
                mx.zeros((*side.shape[:2], offset, side.shape[3]))[:] = side


def _without_sinks(whole: BatchKVCache) -> None:
    """Of a row with fewer keys than the longest, the newest are aligned at the right, and the sinks fall out."""
    sinks, after, kept = whole.rule.sinks, [], []
    for row in whole._rows:
        behind = row.held if row.held_len == whole.slots else [run for _, run in found(row.held, [range(sinks, 2**31)])]
        after.append(replace(row, held=tuple(behind)))
        kept.append([range(row.held_len - sum(map(len, behind)), row.held_len)])
    whole._rearrange(range(whole.batch), after, kept)


def _cut_as_the_longest(original: Any) -> Any:
    def ready(self: BatchLengths) -> tuple[Row, ...]:
        rows: tuple[Row, ...] = original(self)
        seen = self.rule.before(max(self.offsets, default=0))
        return tuple(replace(row, held=tuple(run for _, run in found(row.held, seen))) for row in rows)

    return ready


def _window_of_the_longest() -> Plant:
    """Rows forget what a token at the offset of the longest row would not see."""

    def fetching(original: Any) -> Any:
        def update_and_fetch(self: BatchKVCache, keys: mx.array, values: mx.array) -> Any:
            ready = self._ready()
            if ready != self._rows:
                kept = [
                    [range(slot, slot + len(run)) for slot, run in found(row.held, left.held)]
                    for row, left in zip(self._rows, ready, strict=True)
                ]
                self._rearrange(range(self.batch), ready, kept)
            return original(self, keys, values)

        return update_and_fetch

    return both(
        replacing(BatchLengths, "_ready", _cut_as_the_longest), replacing(BatchKVCache, "update_and_fetch", fetching)
    )


def _by_padded_position(original: Any) -> Any:
    """Every row is taken to stand where the longest one does, as its padding in front would have it."""

    def mask(self: VisibilityRule, queries: mx.array, keys: mx.array) -> mx.array:
        if self.chunk is not None and queries.ndim > 1 and queries.size:
            padding = mx.max(queries[:, :1]) - queries[:, :1]
            queries, keys = queries + padding, keys + padding
        shown: mx.array = original(self, queries, keys)
        return shown

    return mask


def _never_refuses(original: Any) -> Any:
    return lambda self, n: None


def _of_all_rows(original: Any) -> Any:
    """The question is asked of every row, whichever is to be rolled back."""

    def check_rollback(self: BatchLengths, counts: Sequence[int]) -> None:
        original(self, [max(counts, default=0)] * len(counts))

    return check_rollback


def _shares_uncounted(original: Any) -> Any:
    def extract(self: BatchPagedKVCache, row: int) -> PagedKVCache:
        mine = self.tables[row]
        own = PagedKVCache(mine.pool)
        own.offset, own.live_start, own._held = mine.offset, mine.live_start, list(mine._held)
        own.table, own.first = list(mine.table), mine.first
        return own

    return extract


def _keeps_the_tables(original: Any) -> Any:
    def keep(self: BatchPagedKVCache, rows: Sequence[int]) -> tuple[int, ...]:
        kept: tuple[int, ...] = original(self, range(len(rows)))
        return kept

    return keep


FAULTS: tuple[Fault, ...] = (
    Fault(
        "batch-rings-joined-by-offset",
        "rings that join are given as many slots as they have processed tokens, and hold fewer once they have turned",
        "every_operation_completes",
        _stacking(_as_many_as_the_offset),
        "ml-explore/mlx-lm#742 (BatchRotatingKVCache.merge; fixed by #738)",
        shown_on=_rotating,
        layer="batch",
    ),
    Fault(
        "batch-ring-loses-the-sinks-of-a-short-row",
        "when rows of different lengths join, the shorter ones keep the newest keys and no sinks",
        _KEEP,
        _stacking(_without_sinks),
        source="ml-explore/mlx-lm#1631 (batches do not look at the sinks of what joins)",
        shown_on=_has_sinks,
        layer="batch",
    ),
    Fault(
        "batch-window-of-the-longest-row",
        "all rows forget what the longest one does not see any more, wherever they stand themselves",
        "keys_equal_ledger_live_length",
        _window_of_the_longest(),
        "ml-explore/mlx-lm#439 (padding in the window)",
        shown_on=_ruled,
        layer="batch",
    ),
    Fault(
        "batch-chunks-by-padded-position",
        "the mask counts chunks from the first slot, padding included, as if all rows stood where the longest one does",
        _CONTENT,
        replacing(VisibilityRule, "mask", _by_padded_position),
        "huggingface/transformers#40324",
        shown_on=_chunked,
        layer="mask",
    ),
    Fault(
        "batch-rolls-back-across-the-turn-of-a-row",
        "a rollback of a row to where its keys have been forgotten is done as if they were there",
        _REPORTS,
        replacing(Row, "check_rollback", _never_refuses),
        "ml-explore/mlx-swift-lm#584",
        shown_on=_ruled,
        layer="batch",
    ),
    Fault(
        "batch-refuses-for-another-row",
        "a rollback of one row is refused because another one could not be rolled back as far",
        _REPORTS,
        replacing(BatchLengths, "check_rollback", _of_all_rows),
        shown_on=_ruled,
        layer="batch",
    ),
    Fault(
        "batch-extract-shares-its-blocks",
        "who leaves a batch has its blocks in a table that the pool does not know of, and others are given them",
        _ROWS,
        miscounting(replacing(BatchPagedKVCache, "extract", _shares_uncounted)),
        source="raullenchai/Rapid-MLX#196 (who finished took the data of a shared block along)",
        shown_on=_paged,
        layer="batch",
    ),
    Fault(
        "batch-filter-keeps-the-tables",
        "rows leave a batch, and those that stay are given the tables that come first",
        _KEEP,
        replacing(BatchPagedKVCache, "filter", _keeps_the_tables),
        shown_on=_paged,
        layer="batch",
    ),
)
