"""Bugs of a cache that show in the logits alone: lengths are right, and rows stay what they were once written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from reference_models.engine import KVCache, storage

_CACHE_FREE = "outputs_equal_the_cache_free_forward"

Plant = Callable[[], AbstractContextManager[None]]


def _written(change: Callable[[KVCache, mx.array, mx.array], tuple[mx.array, mx.array]]) -> Plant:
    """Changes what is written to a cache: ``change(cache, keys, values)``."""

    def make(original: Any) -> Any:
        def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> Any:
            return original(self, *change(self, keys, values))

        return update_and_fetch

    return replacing(KVCache, "update_and_fetch", make)


def _fetched(change: Callable[[KVCache, mx.array, mx.array, int], tuple[mx.array, mx.array]]) -> Plant:
    """Changes what attention gets, not what is held: ``change(cache, keys, values, new tokens)``."""

    def make(original: Any) -> Any:
        def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> Any:
            held, told = original(self, keys, values)
            return change(self, held, told, keys.shape[2])

        return update_and_fetch

    return replacing(KVCache, "update_and_fetch", make)


def _values_reversed(cache: KVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
    return keys, values[:, :, ::-1] if cache.live_start else values


def _sinks_zeroed(cache: KVCache, keys: mx.array, values: mx.array, new: int) -> tuple[mx.array, mx.array]:
    where = cache.positions
    sinks = where + cache.live_len < cache.offset  # older than they would be without a gap
    return keys, mx.where(sinks[None, None, :, None], 0.0, values)


def _turned_again(cache: KVCache, keys: mx.array, values: mx.array, new: int) -> tuple[mx.array, mx.array]:
    if not cache.live_start:
        return keys, values
    first, second = mx.split(keys, 2, axis=-1)
    cos, sin = mx.cos(mx.array(float(cache.live_start))), mx.sin(mx.array(float(cache.live_start)))
    turned = mx.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    old = mx.arange(keys.shape[2]) < keys.shape[2] - new
    return mx.where(old[None, None, :, None], turned, keys), values


def _keeps_a_rejected_row() -> Plant:
    def remember(original: Any) -> Any:
        def rollback(self: Any, n: int) -> int:
            keys, values = self.rows()
            removed: int = original(self, n)
            if removed:
                row = slice(self.live_len, self.live_len + 1)
                self.rejected = self.offset, (keys[:, :, row], values[:, :, row])
            return removed

        return rollback

    def write(cache: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        (where, stale), cache.rejected = getattr(cache, "rejected", None) or (None, ()), None
        if where != cache.offset:  # a reset in between, say
            return keys, values
        return tuple(
            mx.concatenate([old, new[:, :, 1:]], axis=2) for old, new in zip(stale, (keys, values), strict=True)
        )  # type: ignore[return-value]

    return both(replacing(KVCache, "rollback", remember), _written(write))


def _one_scale_for_all_heads(original: Any) -> Any:
    def quantise_rows(rows: mx.array) -> tuple[mx.array, mx.array]:
        q, scales = original(rows)
        return q, mx.broadcast_to(scales[:, :1], scales.shape)

    return quantise_rows


def _rounds_several_heads(target: Any) -> bool:
    config = target.variant.config
    if target.variant.options.get("cache_form") == "latent":
        return False
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    return bool(target.storage == "int8" and heads > 1)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "values-reversed-behind-a-trim",
        "behind a front trim the values of a chunk are written in reverse, its keys are not",
        _CACHE_FREE,
        _written(_values_reversed),
        layer="cache",
    ),
    Fault(
        "sinks-without-values",
        "attention gets zeros for the values of kept sinks",
        _CACHE_FREE,
        _fetched(_sinks_zeroed),
        layer="cache",
    ),
    Fault(
        "cached-keys-turned-once-more",
        "after a front trim the keys held are rotated again when they are fetched",
        _CACHE_FREE,
        _fetched(_turned_again),
        source="NeuraLegion/shainet#110",
        layer="cache",
    ),
    Fault(
        "rejected-row-survives",
        "the first token behind a rollback keeps the row of the token that was rejected",
        _CACHE_FREE,
        _keeps_a_rejected_row(),
        source="Sudharsanselvaraj/Token-Print#110 (rejected drafts were left in the tensor)",
        layer="cache",
    ),
    Fault(
        "one-int8-scale-for-all-heads",
        "an Int8 cache multiplies every head by the scale of the first",
        "outputs_equal_the_witness",
        replacing(storage, "quantise_rows", _one_scale_for_all_heads),
        source="sgl-project/sglang#26436 (a single head's scale was used for all)",
        shown_on=_rounds_several_heads,
        layer="cache",
    ),
)
"""No property but the two of the outputs finds one of these: a test insists."""
