"""Bugs of memory that is more than anybody needs, or that no table of a sequence counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from harness.faults.blocks import paged
from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models.engine import BatchPool, BlockPool, CachePool, KVCache
from reference_models.engine.side import GROWTH, Side

_TOO_MUCH, _KEPT = "memory_is_given_back", "nothing_is_kept_alive"


def _takes_none_back(original: Any) -> Any:
    return lambda self, blocks: None


def _loses_every_third(original: Any) -> Any:
    def release(self: BlockPool, blocks: Sequence[int]) -> None:
        original(self, [block for block in blocks if block % 3])

    return release


def _keep(pool: Any, caches: Sequence[Any]) -> None:
    """Where no operation ever looks again."""
    pool.__dict__.setdefault("_before", []).append(caches)


def _keeps_who_left(original: Any) -> Any:
    def batch(self: BatchPool, rows: Sequence[int]) -> int:
        was = self.rows, self.batch_caches
        count: int = original(self, rows)
        if set(was[0]) - set(rows):
            _keep(self, was[1])
        return count

    return batch


def _keeps_what_it_overwrites(original: Any) -> Any:
    def snapshot(self: CachePool, seq: int, slot: int) -> int:
        _keep(self, self._slots.get(slot, ()))
        count: int = original(self, seq, slot)
        return count

    return snapshot


def _keeps_what_it_resets(original: Any) -> Any:
    def reset(self: CachePool, seq: int) -> int:
        _keep(self, [cache.copy() for cache in self.scheduler_slice(seq)])
        count: int = original(self, seq)
        return count

    return reset


def _adds_slots(original: Any) -> Any:
    def rollback(self: KVCache, n: int) -> int:
        removed: int = original(self, n)
        for side in (self._keys, self._values):
            if side is not None and removed:
                more = [(0, 0), (0, 0), (0, GROWTH), (0, 0)]
                side.arrays = [mx.pad(array, more) for array in side.arrays]
        return removed

    return rollback


def _reserves_far_ahead(original: Any) -> Any:
    def reserve(self: Side, slots: int, used: int) -> None:
        original(self, slots if self.capacity else max(slots, 4096), used)

    return reserve


def _doubles(original: Any) -> Any:
    def reserve(self: Side, slots: int, used: int) -> None:
        original(self, slots if slots <= self.capacity else max(slots, 2 * self.capacity), used)

    return reserve


def _keeps_them_empty(original: Any) -> Any:
    """For whoever wants caches next."""

    def replace(self: CachePool, seq: int, caches: tuple[KVCache, ...]) -> int:
        old = self.forward_caches(seq)
        count: int = original(self, seq, caches)
        for cache in old:
            cache.reset()
        _keep(self, old)
        return count

    return replace


FAULTS: tuple[Fault, ...] = (
    Fault(
        "blocks-are-never-taken-back",
        "a block that no sequence has any more stays in use for ever",
        _KEPT,
        replacing(BlockPool, "release", _takes_none_back),
        source="jjang-ai/vmlx#68 (requests that were over kept their references to blocks)",
        shown_on=paged,
        layer="cache",
    ),
    Fault(
        "one-block-in-three-is-lost",
        "of the blocks that are given back the pool takes two in three",
        _KEPT,
        replacing(BlockPool, "release", _loses_every_third),
        source="lablup/mlxcel#170 (of two references to a block one was given back)",
        shown_on=paged,
        layer="cache",
    ),
    Fault(
        "batch-that-was-left-stays",
        "when a row leaves, the caches of the batch as it was stay in a list of the pool",
        _KEPT,
        replacing(BatchPool, "batch", _keeps_who_left),
        source="Blaizzy/mlx-vlm#2310 (caches of a batch stayed alive whenever rows came or left)",
        layer="pool",
    ),
    Fault(
        "overwritten-snapshots-stay",
        "a snapshot whose slot is overwritten stays in a list of the pool",
        _KEPT,
        replacing(CachePool, "snapshot", _keeps_what_it_overwrites),
        source="lablup/mlxcel#170 (an entry of a prompt cache that was replaced kept its blocks)",
        layer="pool",
    ),
    Fault(
        "what-was-reset-stays",
        "the caches of a sequence as they were before a reset stay in a list of the pool",
        _KEPT,
        replacing(CachePool, "reset", _keeps_what_it_resets),
        source="waybarrios/vllm-mlx#442 (requests that were over kept a reference to their caches)",
        layer="pool",
    ),
    Fault(
        "rollback-adds-slots",
        "every rollback enlarges the buffers by 256 slots, which nobody needs",
        _TOO_MUCH,
        replacing(KVCache, "rollback", _adds_slots),
        layer="cache",
    ),
    Fault(
        "first-token-takes-4096-slots",
        "buffers are made for 4096 keys when the first one comes",
        _TOO_MUCH,
        replacing(Side, "reserve", _reserves_far_ahead),
        source="paiml/realizar#187 (4096 slots for whoever needed 256)",
        layer="cache",
    ),
)

VARIATIONS: tuple[Fault, ...] = (
    Fault("buffers-double", "buffers double where they must grow", None, replacing(Side, "reserve", _doubles)),
    Fault(
        "replaced-caches-stay-empty",
        "caches that others took the place of are emptied and stay in a list of the pool",
        None,
        replacing(CachePool, "_replace", _keeps_them_empty),
    ),
)
