"""Bugs of trims, rollbacks and growth: what caches and schedulers of released engines did."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import Patch, replacing
from reference_models.engine import CachePool, KVCache, scheduler
from reference_models.engine.side import Side

_LENGTHS = "keys_equal_ledger_live_length"
_ROWS = "cached_rows_stay_what_they_were"
_REPORTS = "trim_reports_what_it_removed"


def _trims(change: Any) -> Patch:
    """``trim_front`` with the arguments that ``change(cache, n, keep)`` gives; it reports what a right one would."""

    def make(original: Any) -> Any:
        def trim_front(self: KVCache, n: int, keep: int = 0) -> int:
            told = min(n, self.live_len)
            original(self, *change(self, n, keep))
            return told

        return trim_front

    return make


def _rolls_back(change: Any) -> Patch:
    def make(original: Any) -> Any:
        def rollback(self: KVCache, n: int) -> int:
            told = min(n, self.live_len)
            original(self, change(self, told))
            return told

        return rollback

    return make


def _resets_at_zero(original: Any) -> Any:
    def trim_front(self: KVCache, n: int, keep: int = 0) -> int:
        removed: int = original(self, n, keep)
        if removed and self.live_len == 0:
            self.offset = self.live_start = 0
        return removed

    return trim_front


def _moves_the_offset(original: Any) -> Any:
    def trim_front(self: KVCache, n: int, keep: int = 0) -> int:
        removed: int = original(self, n, keep)
        self.offset -= removed
        self.live_start -= removed
        self._held = [range(run.start - removed, run.stop - removed) for run in self._held]
        return removed

    return trim_front


def _drops_the_oldest(original: Any) -> Any:
    def rollback(self: KVCache, n: int) -> int:
        n = min(n, self.live_len)
        if 0 < n < self.live_len:
            for side in (self._keys, self._values):
                assert side is not None
                side.drop_slots(0, n, self.live_len)
        return int(original(self, n))

    return rollback


def _keeps_buffers(original: Any) -> Any:
    """The rows stay where they are: only the numbers say that they are gone."""

    def drop_slots(self: Side, first: int, last: int, live: int) -> None:
        return None

    return drop_slots


def _loses_a_row(original: Any) -> Any:
    def reallocate(self: Side, slots: int, pieces: Any) -> None:
        kept = sum(piece.shape[2] for piece in pieces(self.arrays[0])) if slots > self.capacity else 0
        original(self, slots, pieces)
        for array in self.arrays if kept else ():
            array[:, :, kept - 1] = mx.zeros_like(array[:, :, kept - 1])

    return reallocate


def _only_some(pick: Any) -> Patch:
    """The pool visits some of the caches: ``pick(caches)``; it reports as if it had visited all."""

    def make(original: Any) -> Any:
        def visit(self: CachePool, seq: int, n: int, trim: Any) -> Any:
            caches = self.scheduler_slice(seq)
            chosen = {id(cache) for cache in pick(caches)}
            return original(self, seq, n, lambda cache: trim(cache) if id(cache) in chosen else min(n, cache.live_len))

        return visit

    return make


def _shifts(change: Any) -> Patch:
    """A context shift as ``change(right, tokens, limit, keep, n_discard)`` says: slots to keep and tokens to drop;
    ``right`` is the function that knows."""

    def make(original: Any) -> Any:
        def shift(tokens: int, limit: int, keep: int, n_discard: int) -> tuple[int, int]:
            kept, depth = change(original, tokens, limit, keep, n_discard)
            return kept, min(depth, tokens - kept)

        return shift

    return make


def _halves_everything(right: Any, tokens: int, limit: int, keep: int, n_discard: int) -> tuple[int, int]:
    return right(tokens, limit, keep, n_discard or max(1, tokens // 2))  # type: ignore[no-any-return]


def _keeps_too_much(right: Any, tokens: int, limit: int, keep: int, n_discard: int) -> tuple[int, int]:
    keep = min(keep, tokens)
    return keep, max(tokens - limit, n_discard or (tokens - keep) // 2)


def _no_rules(target: Any) -> bool:
    """Caches with a rule of their own refuse to keep anything."""
    return not any(target.rules)


@contextmanager
def _shared_layer() -> Iterator[None]:
    """The last layer is given the cache of the layer before it; pools refuse a cache that is listed twice, models do
    not, so it is the forward that mixes them up."""
    forward_caches = CachePool.forward_caches

    def shared(self: CachePool, seq: int) -> Any:
        caches = forward_caches(self, seq)
        return caches if len(caches) < 2 else (*caches[:-1], caches[-2])

    CachePool.forward_caches = shared  # type: ignore[method-assign]
    try:
        yield
    finally:
        CachePool.forward_caches = forward_caches  # type: ignore[method-assign]


FAULTS: tuple[Fault, ...] = (
    Fault(
        "trim-one-short",
        "trim_front drops one key less than it says",
        _LENGTHS,
        replacing(KVCache, "trim_front", _trims(lambda cache, n, keep: (max(0, min(n, cache.live_len) - 1), keep))),
        "nicedreamzapp/claude-code-local#47 (a trim by another number than that of the tokens held)",
        layer="cache",
    ),
    Fault(
        "trim-one-too-many",
        "trim_front drops one key more than it says",
        _LENGTHS,
        replacing(KVCache, "trim_front", _trims(lambda cache, n, keep: (n + 1 if n else 0, keep))),
        source="lablup/mlxcel#994 (there a rewind, and two too many)",
        layer="cache",
    ),
    Fault(
        "trim-ignores-sinks",
        "trim_front drops the oldest keys whatever it was told to keep",
        _ROWS,
        replacing(KVCache, "trim_front", _trims(lambda cache, n, keep: (n, 0))),
        source="awslabs/keys_values#144 (the initial tokens were evicted first)",
        layer="cache",
    ),
    Fault(
        "bound-keeps-no-sinks",
        "the second generation of enforce_max_kv_size forgets its sinks",
        _ROWS,
        replacing(scheduler, "_SINKS", lambda sinks: 0),
        source="ml-explore/mlx-lm#1631 (sinks were enforced in one place and dropped in another)",
        layer="pool",
    ),
    Fault(
        "shift-ignores-n-discard",
        "a context shift always drops half, whatever it was told to discard",
        _LENGTHS,
        replacing(
            scheduler, "_context_shift", _shifts(lambda right, tokens, limit, keep, n: right(tokens, limit, keep, 0))
        ),
        layer="pool",
    ),
    Fault(
        "shift-halves-everything",
        "a context shift drops half of all tokens instead of half of those behind what it keeps",
        _LENGTHS,
        replacing(scheduler, "_context_shift", _shifts(_halves_everything)),
        shown_on=_no_rules,
        layer="pool",
    ),
    Fault(
        "shift-keeps-nothing",
        "a context shift drops the oldest tokens, those that it was told to keep among them",
        _ROWS,
        replacing(
            scheduler,
            "_context_shift",
            _shifts(lambda right, tokens, limit, keep, n: (0, right(tokens, limit, keep, n)[1])),
        ),
        shown_on=_no_rules,
        layer="pool",
    ),
    Fault(
        "shift-keeps-more-than-its-bound",
        "a context shift keeps as many slots as it was told, which may be more than its bound leaves room for",
        _LENGTHS,
        replacing(scheduler, "_context_shift", _shifts(_keeps_too_much)),
        shown_on=_no_rules,
        layer="pool",
    ),
    Fault(
        "trim-to-zero-starts-again",
        "a cache that was trimmed to nothing starts again at position 0",
        _LENGTHS,
        replacing(KVCache, "trim_front", _resets_at_zero),
        source="ggml-org/llama.cpp#29045 (behind a removal a batch landed at position 0)",
        layer="cache",
    ),
    Fault(
        "trim-moves-the-offset",
        "a front trim also lowers the offset, so that every later key is rotated at the live length",
        _LENGTHS,
        replacing(KVCache, "trim_front", _moves_the_offset),
        "ggml-org/llama.cpp#3825 (positions and the shift that was applied to keys disagreed)",
        layer="cache",
    ),
    Fault(
        "trim-leaves-stale-rows",
        "a front trim changes the numbers of the cache and none of its rows",
        _ROWS,
        replacing(Side, "drop_slots", _keeps_buffers),
        "ml-explore/mlx-lm#1502 (ConcatenateKVCache.trim lowered the offset alone)",
        layer="cache",
    ),
    Fault(
        "trim-visits-the-first-layer-only",
        "the scheduler trims the first cache and reports its number for all",
        _LENGTHS,
        replacing(CachePool, "_visit", _only_some(lambda caches: caches[:1])),
        "ml-explore/mlx-lm#1494 (layers disagreed after a trim that reported the first one's number)",
        layer="pool",
    ),
    Fault(
        "trim-skips-the-last-layer",
        "the last cache is left out of every trim and rollback",
        _LENGTHS,
        replacing(CachePool, "_visit", _only_some(lambda caches: caches[:-1] or caches)),
        "waybarrios/vllm-mlx#69 (quantised layers were left out of a trim)",
        layer="pool",
    ),
    Fault(
        "rollback-one-short",
        "one rejected draft stays in the cache",
        _LENGTHS,
        replacing(KVCache, "rollback", _rolls_back(lambda cache, n: max(0, n - 1))),
        source="lablup/mlxcel#1760 (the last token was run again on a cache that still held it)",
        layer="cache",
    ),
    Fault(
        "rollback-two-too-many",
        "a rewind takes two accepted tokens with the rejected ones",
        _LENGTHS,
        replacing(KVCache, "rollback", _rolls_back(lambda cache, n: n + 2 if n else 0)),
        "lablup/mlxcel#994",
        layer="cache",
    ),
    Fault(
        "rollback-does-nothing",
        "a rollback reports what it should have dropped, and drops nothing",
        _LENGTHS,
        replacing(KVCache, "rollback", _rolls_back(lambda cache, n: 0)),
        "ml-explore/mlx-swift-lm#424 (a rewind of a wrapped window silently did nothing)",
        layer="cache",
    ),
    Fault(
        "rollback-drops-the-oldest",
        "a rollback compacts from the wrong end: the newest rows stay, the oldest go",
        _ROWS,
        replacing(KVCache, "rollback", _drops_the_oldest),
        source="Sudharsanselvaraj/Token-Print#268 (a rewind sliced the last rows, not the first)",
        layer="cache",
    ),
    Fault(
        "growth-loses-a-row",
        "the newest row is not copied when a cache grows past 256 slots",
        _ROWS,
        replacing(Side, "_reallocate", _loses_a_row),
        source="ml-explore/mlx-examples#765 (growth failed unless the offset was a multiple of 256)",
        layer="cache",
    ),
    Fault(
        "layers-share-one-cache",
        "the last attention layer is given the cache of the one before it",
        _LENGTHS,
        _shared_layer,
        source="EfficientMoE/MoE-Infinity#195 (every layer wrote into the same buffer)",
        layer="pool",
    ),
)
