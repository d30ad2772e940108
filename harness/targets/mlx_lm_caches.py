"""What the caches of mlx-lm hold.

Everything here goes by the attributes of a cache, so that nothing of mlx-lm is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import mlx.core as mx
import numpy as np

from harness.rules import CacheRule
from harness.target import CacheLengths, CacheRows
from harness.targets.mlx_lm_quantised import read

NO_KEYS = "no keys, recurrent states only: there is nothing to trim, and no mask"
"""Why a model cannot be judged."""
_NOTHING = np.zeros((1, 1, 0, 0), np.float32)

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


def is_empty(cache: Any) -> bool:
    """Has it had no forward? Older releases have no ``empty``."""
    if hasattr(cache, "empty"):
        return bool(cache.empty())
    if hasattr(cache, "caches"):
        return all(is_empty(each) for each in cache.caches)
    return cache.keys is None if hasattr(cache, "keys") else all(each is None for each in cache.state)


def rule_of(cache: Any) -> CacheRule | None:
    """What a cache forgets. The rotating one goes back only as long as it has not turned (``is_trimmable``); the
    chunked one keeps as many keys as a chunk has, of which the model shows those of the token's own."""
    kind = kind_of(cache)
    if kind == "rotating":
        return CacheRule(cache.max_size, getattr(cache, "keep", 0), rewinds=False)
    return CacheRule(chunk=cache.chunk_size, keeps=cache.chunk_size) if kind == "chunked" else None


def lengths_of(cache: Any) -> CacheLengths:
    """``live_len`` of a rotating or a chunked cache: the keys that the next token sees beside its own."""
    offset, rule = int(cache.offset), rule_of(cache)
    where = positions_of(cache)
    return CacheLengths(offset, 0, len(where if rule is None else rule.seen_from(offset, where)))


def positions_of(cache: Any) -> list[int]:
    """Absolute positions that a cache stores, ascending; of a rotating one those that the next token sees. It may have
    more, which nobody sees again and which a batch does not take over."""
    offset = int(cache.offset)
    if cache.keys is None:
        return []
    kind = kind_of(cache)
    if kind != "rotating":
        return list(range(int(cache.start_position) if kind == "chunked" else 0, offset))
    stored = cache._temporal_order(cache.keys).shape[2]
    sinks = min(cache.keep, stored)
    newest = min(stored - sinks, cache.max_size - 1 - sinks)
    return [*range(sinks), *range(max(sinks, offset - newest), offset)]


def rows_of(cache: Any) -> CacheRows:
    """Keys and values of those positions, float32."""
    where, kind = tuple(positions_of(cache)), kind_of(cache)
    told = None if kind == "dense" else where
    if cache.keys is None or (hasattr(cache, "bits") and not where):
        return CacheRows(_NOTHING, _NOTHING, told)
    if kind != "rotating":
        sides = (side[..., : len(where), :] for side in (cache.keys, cache.values))
        keys, values = map(_array, read(cache, len(where)) if hasattr(cache, "bits") else sides)
        return CacheRows(keys, values, told)
    keys, values = (_array(cache._temporal_order(side)) for side in (cache.keys, cache.values))
    sinks = min(cache.keep, len(where))
    slots = [*range(sinks), *range(keys.shape[2] - (len(where) - sinks), keys.shape[2])]
    return CacheRows(keys[:, :, slots], values[:, :, slots], where)


def no_rows(cache: Any) -> CacheRows:
    """Of a cache of a batch that has had no forward."""
    return CacheRows(_NOTHING, _NOTHING, None if kind_of(cache) == "dense" else ())


def _array(side: mx.array) -> np.ndarray[Any, Any]:
    return np.array(side.astype(mx.float32))


def is_state(cache: Any) -> bool:
    """Has it no keys, but the state of a recurrence or of a convolution?"""
    return kind_of(cache) == "state"
