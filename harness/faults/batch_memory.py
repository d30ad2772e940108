"""Bugs of the memory that a batch holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models.engine import BatchKVCache, BatchPool

_MEMORY = "memory_is_given_back"


def _holds_it_twice(original: Any) -> Any:
    def batch(self: BatchPool, rows: Sequence[int]) -> int:
        came = {seq: tuple(cache.copy() for cache in self.caches_of(seq)) for seq in rows if seq not in self.rows}
        count: int = original(self, rows)
        for seq, caches in came.items():
            self._replace(seq, caches)
        return count

    return batch


def _never_shrinks(original: Any) -> Any:
    def trim_front(self: BatchKVCache, counts: Sequence[int], keep: Any = 0) -> tuple[int, ...]:
        slots = self.capacity
        removed: tuple[int, ...] = original(self, counts, keep)
        for _, side in self._sides():
            more = slots - side.capacity
            side.arrays = [mx.pad(array, [(0, 0), (0, 0), (0, more), (0, 0)]) for array in side.arrays]
        return removed

    return trim_front


FAULTS: tuple[Fault, ...] = (
    Fault(
        "batch-holds-its-rows-twice",
        "who joins a batch keeps its own caches as they were, beside its row",
        _MEMORY,
        replacing(BatchPool, "batch", _holds_it_twice),
        layer="batch",
    ),
    Fault(
        "batch-trim-keeps-the-memory",
        "a front trim in a batch moves its rows within buffers that never shrink",
        _MEMORY,
        replacing(BatchKVCache, "trim_front", _never_shrinks),
        source="lmstudio-ai/mlx-engine#315 (of a batch; buffers grew by 256 slots and never shrank)",
        layer="batch",
    ),
)
