"""Bugs of what a cache is behind a file, a reset, a trim or a rollback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models.engine import KVCache, RotatingKVCache, VisibilityRule
from reference_models.engine.side import GROWTH, Side

_SAVED = "save_and_load_change_nothing"
_MEMORY = "memory_is_given_back"


def loading(
    change: Callable[[dict[str, mx.array], dict[str, Any]], None],
) -> Callable[[], AbstractContextManager[None]]:
    """Changes what a cache is made of when it is read from a file."""

    @contextmanager
    def plant() -> Iterator[None]:
        original = KVCache.__dict__["from_state"]

        def from_state(cls: type[KVCache], arrays: dict[str, mx.array], metadata: dict[str, Any]) -> KVCache:
            arrays, metadata = dict(arrays), dict(metadata)
            change(arrays, metadata)
            cache: KVCache = original.__func__(cls, arrays, metadata)
            return cache

        setattr(KVCache, "from_state", classmethod(from_state))  # noqa: B010  # mypy knows better than to assign it
        try:
            yield
        finally:
            setattr(KVCache, "from_state", original)  # noqa: B010

    return plant


def _only_the_live_length(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> None:
    live = metadata["offset"] - metadata["live_start"]
    metadata |= {"offset": live, "live_start": 0, "held": [[0, live]] if live else []}


def _half_precision(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> None:
    if metadata["storage"] == "rows":
        metadata["dtypes"] = ["float16"] * len(metadata["dtypes"])
        arrays |= {name: array.astype(mx.float16) for name, array in arrays.items()}


def _no_longer_int8(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> None:
    """Its rows come back as the numbers that they stand for: as long as nothing is added, nobody sees it."""
    if metadata["storage"] == "int8":
        metadata["storage"] = "rows"
        for name in ("keys", "values") if arrays else ():
            scales = arrays.pop(f"{name}.1").astype(mx.float32)
            arrays[f"{name}.0"] = arrays[f"{name}.0"].astype(mx.float32) * scales


@contextmanager
def _forgets_the_sinks() -> Iterator[None]:
    """Only the width of what turns is read: all that was held stays, and sinks are ordinary keys from then on."""
    original = KVCache.__dict__["from_state"]

    def from_state(cls: type[KVCache], *given: Any) -> KVCache:
        cache: KVCache = original.__func__(cls, *given)
        if isinstance(cache, RotatingKVCache):
            cache.window, cache.sinks = cache.window - cache.sinks, 0
            cache._rule = VisibilityRule(cache.window, 0)
        return cache

    setattr(KVCache, "from_state", classmethod(from_state))  # noqa: B010
    try:
        yield
    finally:
        setattr(KVCache, "from_state", original)  # noqa: B010


def _keeps_the_offset(original: Any) -> Any:
    def reset(self: KVCache) -> None:
        offset = self.offset
        original(self)
        self.offset = self.live_start = offset

    return reset


def _keeps_the_memory(original: Any) -> Any:
    def reset(self: KVCache) -> None:
        sides = self._keys, self._values
        original(self)
        self._keys, self._values = sides

    return reset


def _makes_room_at_once(original: Any) -> Any:
    """Empty buffers of one quantum are there again before anybody asks for them."""

    def reset(self: KVCache) -> None:
        sides = self._keys, self._values
        original(self)
        for side in sides:
            if side is not None:
                side.arrays = [
                    mx.zeros((*array.shape[:2], GROWTH, array.shape[3]), array.dtype) for array in side.arrays
                ]
        self._keys, self._values = sides

    return reset


def _compacts_in_place(original: Any) -> Any:
    def drop_slots(self: Side, first: int, last: int, live: int) -> None:
        for array in self.arrays:
            array[:, :, first : first + live - last] = mx.array(array[:, :, last:live])
        mx.eval(self.arrays)

    return drop_slots


def _one_too_few(original: Any) -> Any:
    def rollback(self: KVCache, n: int) -> int:
        n = min(n, self.live_len)
        original(self, max(n - 1, 0))
        return n

    return rollback


@contextmanager
def _draft_values_survive() -> Iterator[None]:
    """Behind a rollback keys are written over the rejected drafts, values are not."""
    rollback, update = KVCache.rollback, KVCache.update_and_fetch

    def remembers(self: Any, n: int) -> int:
        removed = rollback(self, n)
        self.stale = removed
        return removed

    def updates(self: Any, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        at, stale = self.live_len, min(getattr(self, "stale", 0), keys.shape[2])
        self.stale = 0
        old = [mx.array(array[:, :, at : at + stale]) for array in self._values.arrays] if self._values else []
        result = update(self, keys, values)
        for array, rows in zip(self._values.arrays, old, strict=False):
            array[:, :, at : at + rows.shape[2]] = rows
        held, other = self.rows()
        return (held, other) if stale else result

    KVCache.rollback = remembers  # type: ignore[method-assign]
    KVCache.update_and_fetch = updates  # type: ignore[method-assign]
    try:
        yield
    finally:
        KVCache.rollback = rollback  # type: ignore[method-assign]
        KVCache.update_and_fetch = update  # type: ignore[method-assign]


def _fresh_rows_are_finer(original: Any) -> Any:
    """A chunk attends to its own rows as computed, later ones to what was cached of them: 8 bits of mantissa."""

    def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        stored = [rows.astype(mx.bfloat16).astype(rows.dtype) for rows in (keys, values)]
        held: tuple[mx.array, mx.array] = original(self, *stored)
        before = held[0].shape[2] - keys.shape[2]
        one, two = (
            mx.concatenate([old[:, :, :before], new], axis=2) for old, new in zip(held, (keys, values), strict=True)
        )
        return one, two

    return update_and_fetch


FAULTS: tuple[Fault, ...] = (
    Fault(
        "file-forgets-live-start",
        "a cache that was read from a file counts its positions from 0",
        _SAVED,
        loading(_only_the_live_length),
        source="scouzi1966/maclocal-api#46 (arrays came back and the offset did not)",
        layer="cache",
    ),
    Fault(
        "file-forgets-the-dtype",
        "rows come back from a file in half precision",
        _SAVED,
        loading(_half_precision),
        source="waybarrios/vllm-mlx#612",
        layer="cache",
    ),
    Fault(
        "file-forgets-int8",
        "an Int8 cache comes back from a file as one of rows, with the same numbers in it",
        _SAVED,
        loading(_no_longer_int8),
        source="ggml-org/llama.cpp#28498 (a file did not say how its rows are stored)",
        layer="cache",
    ),
    Fault(
        "file-forgets-the-sinks",
        "a ring comes back from a file as wide as what turns in it, without its number of sinks",
        _SAVED,
        _forgets_the_sinks,
        source="waybarrios/vllm-mlx#709 (what a ring keeps beside its arrays was not captured)",
        shown_on=lambda target: any(rule is not None and rule.sinks for rule in target.rules),
        layer="cache",
    ),
    Fault(
        "reset-keeps-the-offset",
        "a reset sequence goes on at its old position",
        "keys_equal_ledger_live_length",
        replacing(KVCache, "reset", _keeps_the_offset),
        source="ikawrakow/ik_llama.cpp#1696 (a full reset left a part of the state)",
        layer="cache",
    ),
    Fault(
        "reset-keeps-the-memory",
        "a reset sets the lengths to zero and keeps the buffers",
        _MEMORY,
        replacing(KVCache, "reset", _keeps_the_memory),
        source="ollama/ollama#17875",
        layer="cache",
    ),
    Fault(
        "reset-makes-room-at-once",
        "a reset cache allocates its first 256 slots for a prompt that may never come",
        _MEMORY,
        replacing(KVCache, "reset", _makes_room_at_once),
        source="ollama/ollama#16698 (memory of a cache was not released between requests)",
        layer="cache",
    ),
    Fault(
        "trim-keeps-the-memory",
        "a front trim moves the rows within buffers that never shrink",
        _MEMORY,
        replacing(Side, "drop_slots", _compacts_in_place),
        source="lmstudio-ai/mlx-engine#315 (buffers grew by 256 slots and never shrank)",
        layer="cache",
    ),
    Fault(
        "rollback-one-too-few",
        "a rollback leaves one of the rejected drafts and reports all of them",
        "rollback_equals_never_speculated",
        replacing(KVCache, "rollback", _one_too_few),
        source="ml-explore/mlx-lm#1109 (rejected drafts stayed in the cache)",
        layer="cache",
    ),
    Fault(
        "draft-values-survive",
        "what is written over rejected drafts keeps their values; no length and no kept row shows it",
        "rollback_equals_never_speculated",
        _draft_values_survive,
        source="ml-explore/mlx-lm#1486 (a rewind left stale keys; here values)",
        layer="cache",
    ),
    Fault(
        "cached-rows-are-coarser",
        "a chunk attends to its rows as computed, what follows to a rounded copy of them",
        "chunks_equal_one_shot",
        replacing(KVCache, "update_and_fetch", _fresh_rows_are_finer),
        source="oarriaga/paz#415",
        layer="cache",
    ),
)
