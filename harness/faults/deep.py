"""Bugs that take two things at once: a state that is rare by itself, and an operation that is right in any other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from harness.faults.blocks import miscounting
from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from harness.faults.states import loading
from reference_models.engine import BlockPool, KVCache, PagedKVCache, batch_cache
from reference_models.engine.runs import found, joined

_LENGTHS = "keys_equal_ledger_live_length"
_ROWS = "cached_rows_stay_what_they_were"


def _paged(target: Any) -> bool:
    return bool(target.storage.startswith("paged"))


def _rotating(target: Any) -> bool:
    return bool(target.storage.startswith("rotating"))


def _without_rules(target: Any) -> bool:
    return not any(target.rules)


def _in_one_run(original: Any) -> Any:
    """What was kept in front of a trim is taken to stand right before what was kept behind it."""

    def to_storage(self: KVCache, kind: Any) -> KVCache:
        twin: KVCache = original(self, kind)
        twin._held = [range(twin.offset - twin.held_len, twin.offset)] if twin.held_len else []
        return twin

    return to_storage


def _reads_from_the_block(original: Any) -> Any:
    """Slots are counted from the beginning of the first block, of which an earlier trim has left an offset."""

    def drop(self: PagedKVCache, first: int, last: int, live: int) -> None:
        if first:
            self.first = 0
        original(self, first, last, live)

    return drop


def _drops_the_sinks(original: Any) -> Any:
    """Where sinks have been kept before, the next trim takes the oldest keys, and these are the sinks."""

    def drop(self: KVCache, first: int, last: int, live: int) -> None:
        if first and self.live_start > last - first:
            first, last = 0, last - first
        original(self, first, last, live)

    return drop


def _copies_for_two(original: Any) -> Any:
    def own(self: BlockPool, block: int) -> int:
        return block if self._owners[block] > 2 else original(self, block)

    return own


def _as_they_lie(original: Any) -> Any:
    """The rows of a quantised ring join as they lie, under positions in order."""

    def in_order(cache: KVCache) -> tuple[dict[str, mx.array], dict[str, Any]]:
        arrays, told = original(cache)
        return (cache.state()[0] if cache.storage != "rows" else arrays), told

    return in_order


def _positions_sorted(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> None:
    runs = [range(start, stop) for start, stop in metadata["held"]]
    ordered = joined(run for _, run in found(runs, [range(metadata["offset"])]))
    metadata["held"] = [[run.start, run.stop] for run in ordered]


def _refills(original: Any) -> Any:
    """A rollback behind a trim to nothing goes by the offset, and the cache believes to hold what was trimmed."""

    def rollback(self: KVCache, n: int) -> int:
        count: int = original(self, n)
        if count and self.live_len == 0 and self.live_start:
            self.live_start -= 1
            self._held = [range(self.live_start, self.offset)]
        return count

    return rollback


Plant = Callable[[], AbstractContextManager[None]]

_QUANTISING: Plant = both(
    replacing(KVCache, "to_storage", _in_one_run), replacing(PagedKVCache, "to_storage", _in_one_run)
)

FAULTS: tuple[Fault, ...] = (
    Fault(
        "quantising-forgets-where-sinks-stand",
        "a cache that kept sinks and is quantised believes that all its keys stand next to each other",
        _LENGTHS,
        _QUANTISING,
        shown_on=lambda target: _without_rules(target) and target.row_storage == "rows",
        layer="cache",
    ),
    Fault(
        "sinks-kept-from-the-wrong-place-in-the-block",
        "a trim that keeps sinks, behind one that did not, counts them from the start of the first block",
        _ROWS,
        miscounting(replacing(PagedKVCache, "_drop", _reads_from_the_block)),
        shown_on=_paged,
        layer="cache",
    ),
    Fault(
        "second-trim-drops-the-sinks",
        "a trim that keeps sinks drops them where an earlier trim has been",
        _ROWS,
        replacing(KVCache, "_drop", _drops_the_sinks),
        shown_on=lambda target: _without_rules(target) and not _paged(target),
        layer="cache",
    ),
    Fault(
        "block-of-three-owners-written",
        "a block that three have is written without a copy; one that two have is copied",
        _ROWS,
        replacing(BlockPool, "own", _copies_for_two),
        shown_on=_paged,
        layer="cache",
    ),
    Fault(
        "quantised-ring-joins-as-it-lies",
        "a ring that has turned and is quantised joins a batch with its rows in the order of slots",
        "batches_keep_their_rows",
        replacing(batch_cache, "in_order", _as_they_lie),
        source="ml-explore/mlx-lm#1116 (a merge cut a ring by its buffer)",
        shown_on=lambda target: _rotating(target) and target.row_storage == "rows",
        layer="batch",
    ),
    Fault(
        "file-of-a-turned-ring",
        "a ring that has turned comes back from a file with the positions in order and its rows not",
        "save_and_load_change_nothing",
        loading(_positions_sorted),
        source="waybarrios/vllm-mlx#709 (the cursor of a ring was no part of what is kept)",
        shown_on=_rotating,
        layer="cache",
    ),
    Fault(
        "rollback-to-nothing-behind-a-trim",
        "a rollback of all that a trim has left gives back the last key that was trimmed",
        _LENGTHS,
        replacing(KVCache, "rollback", _refills),
        source="Sudharsanselvaraj/Token-Print#268 (a rewind to nothing kept every row)",
        shown_on=_without_rules,
        layer="cache",
    ),
)
