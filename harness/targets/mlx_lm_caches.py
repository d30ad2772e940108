"""What stands between the models of mlx-lm and caches: what its own caches hold, and ours in the shape that it wants.

Everything here goes by the attributes of a cache, so that nothing of mlx-lm is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from harness.rules import CacheRule
from harness.target import CacheLengths, CacheRows
from reference_models.engine import KVCache, MaskPolicy, masks

CacheKind = Literal["dense", "rotating", "chunked", "state"]
"""What a cache of the library keeps: keys of everything, of a window, of the last chunk, or no keys at all."""


def leaves(caches: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """Every cache with its index in the prompt cache, those of a CacheList one by one."""
    for index, cache in enumerate(caches):
        for leaf in getattr(cache, "caches", (cache,)):
            yield index, leaf


def kind_of(cache: Any) -> CacheKind:
    """What a cache keeps; ``state`` of one that has no axis of keys."""
    if not hasattr(cache, "update_and_fetch"):
        return "state"
    if hasattr(cache, "max_size"):
        return "rotating"
    return "chunked" if hasattr(cache, "chunk_size") else "dense"


def rule_of(cache: Any) -> CacheRule | None:
    """What a cache forgets. The rotating one goes back only as long as it has not turned (``is_trimmable``)."""
    if kind_of(cache) == "rotating":
        return CacheRule(cache.max_size, getattr(cache, "keep", 0), rewinds=False)
    return None


def lengths_of(cache: Any) -> CacheLengths:
    """``live_len`` of a rotating cache: the keys that the next token sees beside its own."""
    offset = int(cache.offset)
    held = len(positions_of(cache))
    return CacheLengths(offset, 0, held if kind_of(cache) == "dense" else min(held, cache.max_size - 1))


def positions_of(cache: Any) -> list[int]:
    """Absolute positions of what a cache stores, ascending."""
    offset = int(cache.offset)
    if cache.keys is None:
        return []
    if kind_of(cache) == "dense":
        return list(range(offset))
    slots = cache._temporal_order(cache.keys).shape[2]
    sinks = min(cache.keep, slots)
    return [*range(sinks), *range(max(sinks, offset - (slots - sinks)), offset)]


def rows_of(cache: Any) -> CacheRows:
    """Keys and values by ascending position, float32."""
    rotates = kind_of(cache) == "rotating"
    where = tuple(positions_of(cache)) if rotates else None
    if cache.keys is None:
        nothing = np.zeros((1, 1, 0, 0), np.float32)
        return CacheRows(nothing, nothing, where)
    if rotates:
        sides = [cache._temporal_order(side) for side in (cache.keys, cache.values)]
    else:
        sides = [side[..., : int(cache.offset), :] for side in (cache.keys, cache.values)]
    keys, values = (np.array(side.astype(mx.float32)) for side in sides)
    return CacheRows(keys, values, where)


class LiveWindow:
    """Our cache as the models of mlx-lm want one: its front can be trimmed, and they go on asking it for masks.

    ``policy``: where the key axis of those masks comes from; ``offset`` is what the library's own caches do.
    ``window``: of the rotating cache that this one stands for, which is what masks are cut to where a model does not
    name a window. Also stands for a batch of sequences.
    """

    def __init__(self, cache: Any, policy: MaskPolicy, window: int | None) -> None:
        self._cache, self._policy, self._window = cache, policy, window

    @property
    def offset(self) -> Any:
        """Absolute position of the next token; int32 ``[B]`` of a batch."""
        return self._cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self._cache.update_and_fetch(keys, values)
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All that is held, for a layer that attends to the keys of another."""
        held: tuple[mx.array, mx.array] = self._cache.rows()
        return held

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """For N new tokens, over the keys that they will be given; always an array where anything is hidden."""
        return masks.mask_for(N, self._cache, self._policy, window_size or self._window)

    @property
    def state(self) -> tuple[Any, Any]:
        keys, values = self._cache.rows()
        return keys, values

    def size(self) -> int:
        return int(self._cache.live_len)

    def empty(self) -> bool:
        return self._cache.rows()[0] is None


class StatefulKVCache(KVCache):
    """The first cache of a sequence of a recurrent model: the states of the other layers are copied with it."""

    def __init__(self, states: Sequence[Any] = ()) -> None:
        super().__init__()
        self.states = list(states)
        self._fresh_states = [type(state)(len(state.cache)) for state in states]

    def reset(self) -> None:
        super().reset()
        self.states = [type(state)(len(state.cache)) for state in self._fresh_states]


class GivenMask:
    """In place of a cache, for one forward over a whole sequence: it hands back what it is given, and the masks of the
    oracle: ``shown(window)``, bool [S, S]. ``offset``: position of the first token."""

    def __init__(self, shown: Any, offset: int, window: int | None) -> None:
        self._shown, self.offset, self._window = shown, offset, window
        self._rows: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._rows = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._rows is not None
        return self._rows

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return mx.array(self._shown(window_size or self._window))


def is_state(cache: Any) -> bool:
    """Has it no keys, but the state of a recurrence or of a convolution?"""
    return kind_of(cache) == "state"
