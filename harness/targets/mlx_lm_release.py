"""What releases of mlx-lm cannot do with caches, found by looking at the library and by trying, never by its version.

A cache without content was long no citizen: it could not be merged, extended, filtered or written. Then a batch of
fresh caches is made from the classes of batches, as ``BatchGenerator`` did, and fresh caches come back from no file.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from harness.targets import mlx_lm_caches as held


def batches(caches: Sequence[Any]) -> bool:
    """Do all of these caches know how to become a batch, and a batch how to give a row back?"""
    return all(hasattr(cache, "merge") for cache in caches)


def merges_nothing(library: Any) -> bool:
    """Can caches without content be merged?"""
    return _does(lambda: library.KVCache.merge([library.KVCache(), library.KVCache()]))


def writes_nothing(library: Any) -> bool:
    """Has a cache without content a state, which a file could hold?"""
    return _does(lambda: library.KVCache().state)


@functools.lru_cache(maxsize=1)
def asks_to_rewind() -> bool:
    """Does speculative generation refuse caches that cannot be trimmed? One that does not goes on as if rejected drafts
    were gone, since ``trim_prompt_cache`` then does nothing and says 0."""
    generation = importlib.import_module("mlx_lm.generate")
    kind = importlib.import_module("mlx_lm.models.cache")._BaseCache  # says that it cannot
    caches = [kind(), kind()]
    step = generation.speculative_generate_step(mx.array([1, 2]), _Unasked(), _Unasked(), prompt_cache=caches)
    try:
        next(step)
    except _Asked:
        return False
    except ValueError:
        return True
    return False


class _Asked(Exception):
    """A model has been called."""


class _Unasked:
    layers = (None,)

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise _Asked


def _does(act: Callable[[], Any]) -> bool:
    try:
        act()
    except Exception:  # each release has its own
        return False
    return True


def batch_of_nothing(library: Any, cache: Any, rows: int) -> Any:
    """What stands for ``rows`` caches like this fresh one in a batch, where they cannot be merged."""
    padding = [0] * rows
    if hasattr(cache, "caches"):
        return type(cache)(*(batch_of_nothing(library, each, rows) for each in cache.caches))
    kind = held.kind_of(cache)
    if kind == "rotating":
        return library.BatchRotatingKVCache(cache.max_size, padding)
    if kind == "state":
        made = type(cache)(len(cache.cache))
        made.left_padding = mx.array(padding)
        return made
    return library.BatchKVCache(padding)
