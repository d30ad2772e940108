"""Bugs that show in programs that are far from small alone: long sequences, wide rings, a batch of four rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models import rope
from reference_models.engine import BatchKVCache, BatchLengths, BlockPool, CachePool, KVCache, RotatingKVCache
from reference_models.engine.ruled import RuledKVCache
from reference_models.engine.runs import in_slots
from reference_models.engine.side import GROWTH, Side

_ROWS = "cached_rows_stay_what_they_were"
_TABLE = 1024  # angles in a table


def _paged(target: Any) -> bool:
    return bool(target.storage.startswith("paged"))


def _wide_ring(target: Any) -> bool:
    return any(rule is not None and (rule.window or 0) > GROWTH for rule in target.rules)


def _wide_ring_without_sinks(target: Any) -> bool:
    return any(rule is not None and (rule.window or 0) > GROWTH > rule.sinks == 0 for rule in target.rules)


def _without_rules(target: Any) -> bool:
    return not any(target.rules) and not _paged(target)


def _forgets_the_last(original: Any) -> Any:
    def reserve(self: Side, slots: int, used: int) -> None:
        grows_again = used > GROWTH and slots > self.capacity
        original(self, slots, used - 1 if grows_again else used)

    return reserve


def _keeps_one_step(original: Any) -> Any:
    def grow(self: BlockPool, count: int) -> None:
        before = [[mx.array(array) for array in side.arrays] for side in self._sides or ()]
        original(self, count)
        for side, arrays in zip(self._sides or (), before, strict=True):
            for array, old in zip(side.arrays, arrays, strict=True):
                if old.shape[2] > GROWTH:
                    array[:, :, GROWTH : old.shape[2]] = mx.zeros_like(old[:, :, GROWTH:])

    return grow


def _quantises_one_step(original: Any) -> Any:
    def to_storage(self: Side, storage: Any) -> Side:
        twin: Side = original(self, storage)
        for array in twin.arrays:
            if array.shape[2] > GROWTH:
                array[:, :, GROWTH:] = mx.zeros_like(array[:, :, GROWTH:])
        return twin

    return to_storage


def _full_at_one_step(original: Any) -> Any:
    def overwritten(self: RotatingKVCache, n: int) -> int | None:
        if n == 1 and self.window > GROWTH and GROWTH <= self.held_len < self.window:
            return self.sinks
        slot: int | None = original(self, n)
        return slot

    return overwritten


def _one_slot_late(original: Any) -> Any:
    def overwritten(self: RotatingKVCache, n: int) -> int | None:
        slot: int | None = original(self, n)
        late = slot is not None and self.window > GROWTH and slot > GROWTH
        return self.sinks if slot is not None and late and slot + 1 == self.window else slot

    return overwritten


def _loses_a_row_in_order(original: Any) -> Any:
    def keep(self: RuledKVCache, parts: list[tuple[int, range]]) -> None:
        slots = [slot for slot, _ in parts]
        late = any(now > max(GROWTH, following) for now, following in pairwise(slots))
        original(self, parts)
        if late and isinstance(self, RotatingKVCache) and self.window > GROWTH and self._values is not None:
            for array in self._values.arrays:
                array[:, :, self.sinks] = mx.zeros_like(array[:, :, self.sinks])

    return keep


def _trims_by_slots(original: Any) -> Any:
    def trim_front(self: RuledKVCache, n: int, keep: int = 0) -> int:
        if isinstance(self, RotatingKVCache) and self.window > GROWTH and not self.sinks and len(self._held) > 1:
            self._held = [range(min(run.start for run in self._held), self.offset)]
        count: int = original(self, n, keep)
        return count

    return trim_front


def _keeps_its_room(original: Any) -> Any:
    def trim_front(self: RuledKVCache, n: int, keep: int = 0) -> int:
        count: int = original(self, n, keep)
        if isinstance(self, RotatingKVCache) and self.window > GROWTH:
            for side in (self._keys, self._values):
                if side is not None:
                    side.reserve(self.window, self.held_len)
        return count

    return trim_front


def _drops_one_more(original: Any) -> Any:
    def rollback(self: KVCache, n: int) -> int:
        more = GROWTH - 64 < n < self.live_len
        count: int = original(self, n + more)
        return count - more

    return rollback


def _takes_the_newest(original: Any) -> Any:
    def rollback(self: KVCache, n: int) -> int:
        before = list(self._held)
        count: int = original(self, n)
        if len(before) > len(self._held) and self._held:  # it went over a gap, and keys are left in front of that
            held = sum(map(len, self._held))
            self._held = in_slots(before, 1, held + 1)
        return count

    return rollback


def _from_the_last_slot(original: Any) -> Any:
    def restore(self: CachePool, seq: int, slot: int) -> int:
        count: int = original(self, seq, max(self._slots) if slot in self._slots else slot)
        return count

    return restore


def _third_for_all(original: Any) -> Any:
    def offset(self: BatchLengths) -> mx.array:
        own: mx.array = original.fget(self)
        return own[mx.minimum(mx.arange(self.batch), 2)]

    return property(offset)


def _leaves_with_the_third(original: Any) -> Any:
    def extract(self: BatchKVCache, row: int) -> KVCache:
        own: KVCache = original(self, row)
        if row > 2 and own._keys is not None and own._values is not None:
            third: KVCache = original(self, 2)
            for mine, other in ((own._keys, third._keys), (own._values, third._values)):
                count = min(own.held_len, third.held_len)
                for array, wrong in zip(mine.arrays, other.arrays if other else (), strict=False):
                    array[:, :, :count] = wrong[:, :, :count]
        return own

    return extract


@contextmanager
def _angles_begin_again() -> Iterator[None]:
    """Behind the end of the table angles are read from its beginning."""
    rotate, ids = rope.rotate, rope.text_position_ids

    def wrapped(offset: Any) -> Any:
        if isinstance(offset, int):
            return offset % _TABLE
        return mx.where(offset >= _TABLE, offset - _TABLE, offset)

    def rotate_short(x: mx.array, offset: Any, *rest: Any, **named: Any) -> mx.array:
        return rotate(x, wrapped(offset), *rest, **named)

    def ids_short(offset: Any, *rest: Any, **named: Any) -> mx.array:
        return ids(wrapped(offset), *rest, **named)

    rope.rotate, rope.text_position_ids = rotate_short, ids_short
    try:
        yield
    finally:
        rope.rotate, rope.text_position_ids = rotate, ids


FAULTS: tuple[Fault, ...] = (
    Fault(
        "second-growth-forgets-a-row",
        "the second time that a cache grows, the newest row is not moved to the new buffers",
        _ROWS,
        replacing(Side, "reserve", _forgets_the_last),
        shown_on=_without_rules,
        layer="cache",
    ),
    Fault(
        "second-growth-of-the-blocks",
        "when a pool of blocks grows for the second time, what lies behind its first 256 slots is lost",
        _ROWS,
        replacing(BlockPool, "_grow", _keeps_one_step),
        shown_on=_paged,
        layer="cache",
    ),
    Fault(
        "one-growth-step-is-quantised",
        "of a cache that is quantised in mid-way the first 256 slots are, and the others are zeros",
        "quantised_rows_stay_within_their_bound",
        replacing(Side, "to_storage", _quantises_one_step),
        shown_on=lambda target: _without_rules(target) and target.row_storage == "rows",
        layer="cache",
    ),
    Fault(
        "wide-ring-full-at-one-growth-step",
        "a ring wider than 256 slots turns as soon as its first 256 are in use",
        "keys_equal_ledger_live_length",
        replacing(RotatingKVCache, "_overwritten", _full_at_one_step),
        shown_on=_wide_ring,
        layer="cache",
    ),
    Fault(
        "wide-ring-turns-one-slot-late",
        "a ring wider than 256 slots skips its last one when it turns, and overwrites the first behind the sinks again",
        "outputs_equal_the_witness",
        replacing(RotatingKVCache, "_overwritten", _one_slot_late),
        shown_on=_wide_ring,
        layer="cache",
    ),
    Fault(
        "wide-ring-in-order-loses-a-row",
        "a ring wider than 256 slots that has turned past them loses its oldest row where it is put in order",
        _ROWS,
        replacing(RuledKVCache, "_keep", _loses_a_row_in_order),
        shown_on=_wide_ring,
        layer="cache",
    ),
    Fault(
        "wide-ring-is-trimmed-by-slots",
        "a front trim takes a ring wider than 256 slots that has turned for one that is in order",
        _ROWS,
        replacing(RuledKVCache, "trim_front", _trims_by_slots),
        shown_on=_wide_ring_without_sinks,
        layer="cache",
    ),
    Fault(
        "wide-ring-keeps-its-room",
        "a front trim leaves a ring wider than 256 slots the room for its whole window, however few keys are left",
        "memory_is_given_back",
        replacing(RuledKVCache, "trim_front", _keeps_its_room),
        shown_on=_wide_ring_without_sinks,
        layer="cache",
    ),
    Fault(
        "rollback-far-drops-one-more",
        "a rollback of about a growth step drops a key more than it says",
        "keys_equal_ledger_live_length",
        replacing(KVCache, "rollback", _drops_one_more),
        shown_on=_without_rules,
        layer="cache",
    ),
    Fault(
        "rollback-over-a-gap-keeps-the-newest-sinks",
        "a rollback that goes over the gap behind sinks takes the oldest of them instead of the newest",
        "keys_equal_ledger_live_length",
        replacing(KVCache, "rollback", _takes_the_newest),
        shown_on=_without_rules,
        layer="cache",
    ),
    Fault(
        "restore-from-the-last-slot",
        "a restore gives back what the highest slot holds, whichever was asked for",
        "snapshots_give_back_what_they_took",
        replacing(CachePool, "restore", _from_the_last_slot),
        layer="pool",
    ),
    Fault(
        "fourth-row-at-the-offset-of-the-third",
        "offsets of a batch are kept for three rows, and further ones are given that of the third",
        "mask_shows_exactly_the_visible_set",
        replacing(BatchLengths, "offset", _third_for_all),
        layer="batch",
    ),
    Fault(
        "fourth-row-leaves-with-the-third",
        "a row behind the third leaves a batch with keys of the third",
        "batches_keep_their_rows",
        replacing(BatchKVCache, "extract", _leaves_with_the_third),
        shown_on=lambda target: not _paged(target),
        layer="batch",
    ),
    Fault(
        "angles-begin-again-at-1024",
        "a table of angles has 1,024 of them, and positions behind it begin again",
        "positions_are_absolute",
        _angles_begin_again,
        shown_on=lambda target: getattr(target.variant.config, "rotates", True),
        layer="positions",
    ),
)
