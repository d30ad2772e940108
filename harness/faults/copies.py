"""Bugs of snapshots and forks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any, cast

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from harness.targets.reference_session import ReferenceSession
from reference_models.engine import CachePool, KVCache
from reference_models.engine.side import Side

_SNAPSHOT = "snapshots_give_back_what_they_took"
_FORK = "forks_share_nothing"


def _shallow(cache: KVCache) -> KVCache:
    """Lengths of its own, and the buffers of the other."""
    twin = copy(cache)
    twin._held = list(cache._held)
    return twin


def _keeps_the_buffers(original: Any) -> Any:
    def snapshot(self: CachePool, seq: int, slot: int) -> int:
        caches = self.scheduler_slice(seq)
        if caches:
            self._slots[slot] = tuple(map(_shallow, caches))
        return len(caches)

    return snapshot


def _hands_out_the_snapshot(original: Any) -> Any:
    def restore(self: CachePool, seq: int, slot: int) -> int:
        kept = self._slots.get(slot, ())
        return self._replace(seq, kept) if self.scheduler_slice(seq) and kept else 0

    return restore


def _forgets_live_start(original: Any) -> Any:
    def restore(self: CachePool, seq: int, slot: int) -> int:
        count: int = original(self, seq, slot)
        for cache in self.scheduler_slice(seq)[:count]:
            cache.live_start = 0
        return count

    return restore


def _trims_the_slots(original: Any) -> Any:
    def trim_front(self: CachePool, seq: int, n: int, keep: int = 0) -> Any:
        for caches in self._slots.values():
            for cache in caches:
                cache.trim_front(n, keep)
        return original(self, seq, n, keep)

    return trim_front


def _trims_every_sequence(original: Any) -> Any:
    def trim_front(self: CachePool, seq: int, n: int, keep: int = 0) -> Any:
        for other in self.sequences:
            if other != seq:
                original(self, other, n, keep)
        return original(self, seq, n, keep)

    return trim_front


def _resets_every_sequence(original: Any) -> Any:
    def reset(self: CachePool, seq: int) -> int:
        for other in self.sequences:
            if other != seq:
                original(self, other)
        count: int = original(self, seq)
        return count

    return reset


def _shares_the_buffers(original: Any) -> Any:
    def fork(self: CachePool, seq: int, into: int) -> int:
        caches = self.scheduler_slice(seq)
        return self._replace(into, tuple(map(_shallow, caches))) if caches and self.scheduler_slice(into) else 0

    return fork


def _leaves_the_scales(original: Any) -> Any:
    def fork(self: CachePool, seq: int, into: int) -> int:
        count: int = original(self, seq, into)
        for cache in self.scheduler_slice(into)[:count]:
            for side in (cache._keys, cache._values):
                if side is not None:
                    side.arrays[1:] = [mx.ones_like(scales) for scales in side.arrays[1:]]
        return count

    return fork


def _forgets_the_prompt(original: Any) -> Any:
    """The caches are another state's, and the prompt is the sequence's own."""

    def method(self: Any, *given: int) -> Any:
        prompts = list(self._prompts)
        seen = original(self, *given)
        self._prompts = prompts
        return seen

    return method


@contextmanager
def _copies_on_write() -> Iterator[None]:
    """Copies share their arrays until one of them is written to: lazier than the reference engine, and as right."""
    deep, write = Side.__deepcopy__, Side.write

    def shared(self: Any, memo: dict[int, object]) -> Side:
        twin: Any = copy(self)
        twin.arrays = list(self.arrays)
        self.shared = twin.shared = True
        return cast(Side, twin)

    def detached(self: Any, at: int, rows: mx.array) -> None:
        if getattr(self, "shared", False):
            self.arrays = [mx.array(array) for array in self.arrays]
            self.shared = False
        write(self, at, rows)

    Side.__deepcopy__ = shared  # type: ignore[method-assign]
    Side.write = detached  # type: ignore[method-assign]
    try:
        yield
    finally:
        Side.__deepcopy__ = deep  # type: ignore[method-assign]
        Side.write = write  # type: ignore[method-assign]


FAULTS: tuple[Fault, ...] = (
    Fault(
        "snapshot-aliases-the-buffers",
        "a snapshot has its own lengths and the buffers of the sequence: what is written in place shows in it",
        _SNAPSHOT,
        replacing(CachePool, "snapshot", _keeps_the_buffers),
        source="waybarrios/vllm-mlx#575",
        layer="pool",
    ),
    Fault(
        "restore-hands-out-the-snapshot",
        "a restored sequence goes on with the snapshot itself, so a second restore gives back another state",
        _SNAPSHOT,
        replacing(CachePool, "restore", _hands_out_the_snapshot),
        source="MemTensor/MemOS#2301",
        layer="pool",
    ),
    Fault(
        "restore-forgets-live-start",
        "a restored sequence starts at position 0, whatever was trimmed before its snapshot",
        _SNAPSHOT,
        replacing(CachePool, "restore", _forgets_live_start),
        source="vllm-project/vllm-metal#144 (rows were restored and the offset stayed 0)",
        layer="pool",
    ),
    Fault(
        "trim-reaches-the-snapshots",
        "a front trim of a sequence trims what is in the slots as well",
        _SNAPSHOT,
        replacing(CachePool, "trim_front", _trims_the_slots),
        source="waybarrios/vllm-mlx#576 (what decode did reached a saved snapshot; here a trim)",
        layer="pool",
    ),
    Fault(
        "fork-shares-the-buffers",
        "a fork has its own lengths and the buffers of its source: both write into the same slots",
        _FORK,
        replacing(CachePool, "fork", _shares_the_buffers),
        source="ml-explore/mlx-swift-lm#629 (copies were aliases of one buffer)",
        layer="pool",
    ),
    Fault(
        "fork-leaves-the-scales",
        "a fork copies the rows of an Int8 cache and not their scales",
        _FORK,
        replacing(CachePool, "fork", _leaves_the_scales),
        source="vllm-project/vllm#55559 (layers that share a quantised cache read it with scales of 1)",
        layer="pool",
    ),
    Fault(
        "trim-reaches-every-sequence",
        "a front trim of a sequence trims all that the pool owns",
        "sequences_are_isolated",
        replacing(CachePool, "trim_front", _trims_every_sequence),
        source="ggml-org/llama.cpp#26790 (there a restore cleared the keys of all sequences)",
        layer="pool",
    ),
    Fault(
        "reset-reaches-every-sequence",
        "a reset of a sequence empties all that the pool owns",
        "sequences_are_isolated",
        replacing(CachePool, "reset", _resets_every_sequence),
        source="ggml-org/llama.cpp#25521",
        layer="pool",
    ),
)

IMAGE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "fork-forgets-the-prompt",
        "a fork takes over the caches of a prompt with images and not where its tokens stand",
        "positions_are_absolute",
        replacing(ReferenceSession, "fork", _forgets_the_prompt),
        source="mlx-node/mlx-node#50 (continued sessions with images lost their RoPE delta)",
        layer="images",
    ),
    Fault(
        "restore-forgets-the-prompt",
        "a restored sequence keeps the prompt that it had in between",
        "positions_are_absolute",
        replacing(ReferenceSession, "restore", _forgets_the_prompt),
        source="ml-explore/mlx-swift-lm#443 (caches came back without the RoPE delta of their prompt)",
        layer="images",
    ),
    Fault(
        "reset-keeps-the-prompt",
        "behind a reset the tokens of the old prompt are still expected",
        "every_operation_completes",
        replacing(ReferenceSession, "reset", _forgets_the_prompt),
        source="jundot/omlx#3346 (position state of one prompt was left for the next turn)",
        layer="images",
    ),
)
"""Of the path with images alone."""

VARIATIONS: tuple[Fault, ...] = (
    Fault("copies-on-write", "copies share their arrays until one is written to", None, _copies_on_write),
)
