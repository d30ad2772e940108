"""Bugs of quantised caches: what is lost as rows are quantised, steps that are too wide, refusals that do not come."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from harness.rules import fits_all
from reference_models.engine import CachePool, KVCache, side, storage
from reference_models.engine.int8 import INT8_MAX
from reference_models.engine.side import Side

_BOUND = "quantised_rows_stay_within_their_bound"


def _not_paged(target: Any) -> bool:
    """A paged cache fills the blocks of a new pool."""
    return not target.storage.startswith("paged")


def _quantises(target: Any) -> bool:
    return _not_paged(target) and target.row_storage == "rows"


def _some_misfit(target: Any) -> bool:
    """Is there a storage that its caches must refuse while they are empty?"""
    return target.row_storage == "rows" and not fits_all(target.row_widths)


def _forgets_live_start(original: Any) -> Any:
    def to_storage(self: CachePool, seq: int, *rest: Any) -> int:
        count: int = original(self, seq, *rest)
        for cache in self.scheduler_slice(seq)[:count]:
            cache.live_start = 0
        return count

    return to_storage


def _loses_the_last_slot(original: Any) -> Any:
    def to_storage(self: KVCache, kind: Any) -> KVCache:
        twin: KVCache = original(self, kind)
        for buffers in (twin._keys, twin._values) if twin.held_len else ():
            for array in buffers.arrays if buffers is not None else ():
                array[:, :, twin.held_len - 1] = mx.zeros_like(array[:, :, 0])
        return twin

    return to_storage


def _affine_loses_the_newest(original: Any) -> Any:
    """Of a cache that holds rows already: those that come in affine from the start are right."""
    loses = _loses_the_last_slot(original)

    def to_storage(self: KVCache, kind: Any) -> KVCache:
        twin: KVCache = (loses if kind.startswith("affine") else original)(self, kind)
        return twin

    return to_storage


def _leaves_the_values(original: Any) -> Any:
    def to_storage(self: KVCache, kind: Any) -> KVCache:
        twin: KVCache = original(self, kind)
        twin._values = self.copy()._values
        return twin

    return to_storage


def _scales_one_off(original: Any) -> Any:
    def to_storage(self: Side, kind: Any) -> Side:
        twin: Side = original(self, kind)
        twin.arrays[1:] = [mx.concatenate([array[:, :, 1:], array[:, :, :1]], axis=2) for array in twin.arrays[1:]]
        return twin

    return to_storage


def _one_scale_for_a_forward(original: Any) -> Any:
    """The largest of all its tokens decides, so that the rows of the others get steps that are too wide."""

    def quantise_rows(rows: mx.array) -> tuple[mx.array, mx.array]:
        wide = rows.astype(mx.float32)
        scales = (mx.max(mx.abs(wide), axis=(2, 3), keepdims=True) / INT8_MAX).astype(mx.float16)
        scales = mx.broadcast_to(mx.where(scales == 0, 1, scales), (*rows.shape[:3], 1))
        return mx.round(wide / scales.astype(mx.float32)).astype(mx.int8), scales.astype(mx.float16)

    return quantise_rows


def _half_the_bits(original: Any) -> Any:
    def encode(kind: Any, rows: mx.array) -> Any:
        if kind == "affine8" and rows.size:
            rows = storage.decode("affine4", original("affine4", rows), rows.dtype)
        return original(kind, rows)

    return encode


def _quantises_all_again(original: Any) -> Any:
    """With each append the rows held are read back and quantised anew, with the steps of the widest of them."""

    def write(self: Side, at: int, rows: mx.array) -> None:
        original(self, at, rows)
        if self.storage == "rows" or at == 0:
            return
        held = self.held(at)
        step = mx.max(mx.abs(held), axis=(2, 3), keepdims=True) / INT8_MAX
        original(self, 0, mx.round(held / mx.maximum(step, 1e-6)) * step)

    return write


def _asks_no_widths(original: Any) -> Any:
    def to_storage(self: CachePool, seq: int, kind: Any, widths: Any = ()) -> int:
        count: int = original(self, seq, kind)
        return count

    return to_storage


def _says_done(original: Any) -> Any:
    def to_storage(self: KVCache, kind: Any) -> KVCache:
        twin: KVCache = self.copy() if self.storage != "rows" else original(self, kind)
        return twin

    return to_storage


FAULTS: tuple[Fault, ...] = (
    Fault(
        "quantising-loses-the-last-slot",
        "quantising a cache leaves out the last of its slots in use",
        _BOUND,
        replacing(KVCache, "to_storage", _loses_the_last_slot),
        shown_on=_quantises,
        layer="cache",
    ),
    Fault(
        "affine-quantising-loses-the-newest-row",
        "a cache that becomes an affine one in mid-sequence loses the newest of its rows",
        _BOUND,
        replacing(KVCache, "to_storage", _affine_loses_the_newest),
        shown_on=lambda target: _quantises(target) and fits_all(target.row_widths),
        layer="cache",
    ),
    Fault(
        "quantising-forgets-live-start",
        "a quantised cache counts from position 0, whatever was trimmed before",
        "keys_equal_ledger_live_length",
        replacing(CachePool, "to_storage", _forgets_live_start),
        "waybarrios/vllm-mlx#69 (a trimmed cache was quantised with the lengths that it had before)",
        shown_on=lambda target: target.row_storage == "rows",
        layer="pool",
    ),
    Fault(
        "quantising-leaves-the-values",
        "the keys alone are quantised, and values stay as they are given",
        _BOUND,
        replacing(KVCache, "to_storage", _leaves_the_values),
        "rajveer43/VeloxQuant-MLX#162 (one side of the cache was never quantised in decode)",
        shown_on=_quantises,
        layer="cache",
    ),
    Fault(
        "scales-of-the-next-row",
        "behind a quantisation every row is read with the scale of the next",
        _BOUND,
        replacing(Side, "to_storage", _scales_one_off),
        source="vllm-project/vllm#38874 (scales read at the wrong addresses)",
        shown_on=_quantises,
        layer="cache",
    ),
    Fault(
        "one-scale-for-a-forward",
        "an Int8 scale is made for all tokens of a forward instead of for each",
        _BOUND,
        replacing(storage, "quantise_rows", _one_scale_for_a_forward),
        shown_on=lambda target: target.row_storage in ("rows", "int8"),
        layer="cache",
    ),
    Fault(
        "affine-with-half-the-bits",
        "rows of 8 bits hold what 4 bits can tell apart",
        _BOUND,
        replacing(side, "encode", _half_the_bits),
        shown_on=lambda target: target.storage == "affine8",
        layer="cache",
    ),
    Fault(
        "quantises-all-again",
        "with every append all rows held are read back and quantised anew, and errors add up",
        _BOUND,
        replacing(Side, "write", _quantises_all_again),
        source="foundation-model-stack/fms-model-optimizer#107",
        shown_on=_not_paged,
        layer="cache",
    ),
    Fault(
        "quantising-refused-too-late",
        "an empty cache is quantised to a storage that its first rows do not fit",
        _BOUND,
        replacing(CachePool, "to_storage", _asks_no_widths),
        "Blaizzy/mlx-vlm#2061 (a head dimension that is no multiple of the group size raises in the forward)",
        shown_on=_some_misfit,
        layer="pool",
    ),
    Fault(
        "quantising-again-says-done",
        "a cache that is quantised already reports that it has been quantised to another storage",
        _BOUND,
        replacing(KVCache, "to_storage", _says_done),
        shown_on=_not_paged,
        layer="cache",
    ),
)
