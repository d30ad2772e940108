"""Bugs and harmless variations for the reference engine, as small patches of its functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing as _replacing
from reference_models import rope
from reference_models.engine import CachePool, KVCache, masks
from reference_models.engine.side import Side


def _mask(change: Callable[[mx.array, int, str], mx.array]) -> Callable[[], AbstractContextManager[None]]:
    """Changes the mask of every chunk: ``change(mask [l, K], keys before the chunk, policy)``."""

    def make(original: Any) -> Any:
        def chunk_mask(l: int, cache: Any, policy: str = "live", window: int | None = None) -> mx.array | None:
            mask = original(l, cache, policy, window)
            return None if mask is None else change(mask, mask.shape[-1] - l, policy)

        return chunk_mask

    return _replacing(masks, "chunk_mask", make)


def _leak(mask: mx.array, before: int, policy: str) -> mx.array:
    """Row q of a leaking mask is row q + 1 of a right one."""
    return mx.concatenate([mask[1:], mask[-1:]])


def _strict(mask: mx.array, before: int, policy: str) -> mx.array:
    rows, keys = mask.shape
    itself = mx.arange(rows)[:, None] + before == mx.arange(keys)[None]
    return mask & ~(itself & (mx.arange(keys)[None] > 0))


def _bias(mask: mx.array, before: int, policy: str) -> mx.array:
    """Shows exactly what it must, but the fixed policy adds a little to the score of the oldest key."""
    hidden = mx.where(mask, 0.0, -mx.inf)
    return hidden if policy == "offset" else hidden + mx.where(mx.arange(mask.shape[-1]) == 0, 0.25, 0.0)


def _blinds_the_last(mask: mx.array, before: int, policy: str) -> mx.array:
    """Behind cached keys the last token of a chunk sees nothing at all; with -inf everywhere softmax gives NaN."""
    if before:
        mask = mask & (mx.arange(mask.shape[0])[:, None] < mask.shape[0] - 1)
    return mx.where(mask, 0.0, -mx.inf)


def _no_mask(original: Any) -> Any:
    """Draws the line between "one token needs no mask" and the rest one too far."""

    def chunk_mask(l: int, cache: Any, policy: str = "live", window: int | None = None) -> mx.array | None:
        return None if l == 2 else original(l, cache, policy, window)

    return chunk_mask


def _additive(low: float) -> Callable[[mx.array, int, str], mx.array]:
    return lambda mask, before, policy: mx.where(mask, 0.0, low)


def _reports(original: Any) -> Any:
    def trim_front(self: KVCache, n: int, keep: int = 0) -> int:
        original(self, n, keep)
        return 0

    return trim_front


def _stands_still(original: Any) -> Any:
    def trim_front(self: KVCache, n: int, keep: int = 0) -> int:
        return min(n, self.live_len)

    return trim_front


def _moves_live_start(original: Any) -> Any:
    def rollback(self: KVCache, n: int) -> int:
        removed: int = original(self, n)
        if removed:
            self.live_start += 0 if self.live_start == 0 else 1
        return removed

    return rollback


def _shifts(original: Any) -> Any:
    def drop_slots(self: Any, first: int, last: int, live: int) -> None:
        shift = 1 if last < live else 0
        original(self, first, last - shift, live - shift)

    return drop_slots


def _leaves_scales(original: Any) -> Any:
    def drop_slots(self: Any, first: int, last: int, live: int) -> None:
        scales = [mx.array(array) for array in self.arrays[1:]]
        original(self, first, last, live)
        self.arrays[1:] = [array[:, :, : self.capacity] for array in scales]

    return drop_slots


def _raises_when_empty(original: Any) -> Any:
    def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self.live_len == 0 and self.offset > 0:
            raise RuntimeError("no buffer to append to")
        result: tuple[mx.array, mx.array] = original(self, keys, values)
        return result

    return update_and_fetch


def _noisy(original: Any) -> Any:
    calls = count()

    def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        result: tuple[mx.array, mx.array] = original(self, keys, values + 1e-3 * (next(calls) % 7))
        return result

    return update_and_fetch


def _ignores_owner(original: Any) -> Any:
    def scheduler_slice(self: CachePool, seq: int) -> Any:
        return self.forward_caches(seq)

    return scheduler_slice


@contextmanager
def _rotates_at_live_length() -> Iterator[None]:
    """Positions count the keys that are held; after a front trim they fall behind."""
    start = 0
    forward_caches, rotate, ids = CachePool.forward_caches, rope.rotate, rope.text_position_ids

    def watched(self: CachePool, seq: int) -> Any:
        nonlocal start
        caches = forward_caches(self, seq)
        start = caches[0].live_start
        return caches

    def rotate_live(x: mx.array, offset: int, *rest: Any, **named: Any) -> mx.array:
        return rotate(x, offset - start, *rest, **named)

    def ids_live(offset: int, *rest: Any, **named: Any) -> mx.array:
        return ids(offset - start, *rest, **named)

    CachePool.forward_caches = watched  # type: ignore[method-assign]
    rope.rotate, rope.text_position_ids = rotate_live, ids_live  # type: ignore[assignment]
    try:
        yield
    finally:
        CachePool.forward_caches = forward_caches  # type: ignore[method-assign]
        rope.rotate, rope.text_position_ids = rotate, ids


FAULTS: tuple[Fault, ...] = (
    Fault(
        "mask-leaks-one-future-token",
        "the causal mask shows every token the one after it",
        "mask_shows_exactly_the_visible_set",
        _mask(_leak),
        source="keras-team/keras#23038 (a lost causal mask showed all future tokens)",
        layer="mask",
    ),
    Fault(
        "no-mask-for-two-tokens",
        "a chunk of two tokens gets no mask at all, so the first sees the second",
        "mask_shows_exactly_the_visible_set",
        _replacing(masks, "chunk_mask", _no_mask),
        source="EricLBuehler/mistral.rs#2301 (later chunks lost their mask, like decode steps)",
        layer="mask",
    ),
    Fault(
        "mask-hides-everything-from-the-last-token",
        "behind cached keys the last row of the mask is all hidden",
        "every_forward_gives_finite_logits",
        _mask(_blinds_the_last),
        source="pytorch/pytorch#109517 (a row that is masked completely gives NaN)",
        layer="mask",
    ),
    Fault(
        "mask-hides-the-token-itself",
        "the causal comparison is strict",
        "mask_shows_exactly_the_visible_set",
        _mask(_strict),
        source="paiml/aprender#2029 (all layers but the last left the new token's own key out)",
        layer="mask",
    ),
    Fault(
        "fix-changes-untrimmed-output",
        "the mask of the fixed policy carries a small bias, so the fix is not neutral where nothing was trimmed",
        "untrimmed_outputs_are_byte_identical",
        _mask(_bias),
        "lablup/mlxcel#420 (promises byte identity on the untrimmed path)",
        layer="mask",
    ),
    Fault(
        "rotates-at-live-length",
        "RoPE counts the keys that are held instead of the absolute position",
        "positions_are_absolute",
        _rotates_at_live_length,
        source="rajveer43/VeloxQuant-MLX#389 (the offset was set to the number of rows kept)",
        layer="positions",
    ),
    Fault(
        "trim-returns-without-moving",
        "trim_front reports n removed and removes nothing",
        "keys_equal_ledger_live_length",
        _replacing(KVCache, "trim_front", _stands_still),
        source="ml-explore/mlx-swift-lm#618 (a rotating cache inherited a trim that does nothing)",
        layer="cache",
    ),
    Fault(
        "rollback-moves-live-start",
        "a rollback after a front trim also moves live_start",
        "keys_equal_ledger_live_length",
        _replacing(KVCache, "rollback", _moves_live_start),
        layer="cache",
    ),
    Fault(
        "trim-keeps-the-wrong-rows",
        "the compaction behind a front trim starts one slot too early",
        "cached_rows_stay_what_they_were",
        _replacing(Side, "drop_slots", _shifts),
        source="JaydenLyh/Reward-Forcing#5 (evicted rows were counted from the wrong slot)",
        layer="cache",
    ),
    Fault(
        "scales-stay-behind",
        "rows move in a front trim, and the scales of an Int8 cache do not",
        "cached_rows_stay_what_they_were",
        _replacing(Side, "drop_slots", _leaves_scales),
        source="rajveer43/VeloxQuant-MLX#369 (a trim left a part of a quantised cache's state behind)",
        layer="cache",
    ),
    Fault(
        "trim-reports-zero",
        "trim_front removes what it should and reports 0",
        "trim_reports_what_it_removed",
        _replacing(KVCache, "trim_front", _reports),
        source="ml-explore/mlx-swift-lm#424 (a trim reported 0 and nobody looked; there it had not moved)",
        layer="cache",
    ),
    Fault(
        "pool-trims-what-it-does-not-own",
        "the scheduler's slice holds the caches of a model-owned sequence",
        "trim_reports_what_it_removed",
        _replacing(CachePool, "scheduler_slice", _ignores_owner),
        layer="pool",
    ),
    Fault(
        "append-after-trim-to-zero-raises",
        "a cache that was trimmed to zero cannot be appended to",
        "every_operation_completes",
        _replacing(KVCache, "update_and_fetch", _raises_when_empty),
        source="Blaizzy/mlx-vlm#1900 (caches of length 0 crashed, there in a merge)",
        layer="cache",
    ),
    Fault(
        "state-leaks-between-sessions",
        "a counter of the process changes the values that are cached",
        "same_program_same_bytes",
        _replacing(KVCache, "update_and_fetch", _noisy),
        source="ikawrakow/ik_llama.cpp#1696 (the next request inherited hidden state)",
        layer="cache",
    ),
)
"""Each names the property that must find it. The bug that started it all, a mask sized by the offset, is no patch: it
is the mask policy ``offset`` of the reference models, and ``kv-harness run --policy offset`` shows it."""

VARIATIONS: tuple[Fault, ...] = (
    Fault("additive-minus-infinity", "additive masks of 0 and -inf", None, _mask(_additive(-float("inf")))),
    Fault("additive-minus-1e9", "additive masks of 0 and -1e9", None, _mask(_additive(-1e9))),
    Fault("additive-fp16-minimum", "additive masks of 0 and -65504", None, _mask(_additive(-65504.0))),
    Fault("four-axes", "masks of shape [1, 1, l, K]", None, _mask(lambda mask, before, policy: mask[None, None])),
)
"""Right in another way than the reference models; a finding about one of these is a false alarm."""
