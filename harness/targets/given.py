"""What quantised caches are given, which their rows must stay close to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx


@contextmanager
def given_to(quantised: Sequence[Any]) -> Iterator[list[tuple[mx.array, mx.array]]]:
    """The keys and values that these caches are given meanwhile, in the order in which they are."""
    given: list[tuple[mx.array, mx.array]] = []
    for cache in quantised:

        def noted(keys: mx.array, values: mx.array, take: Any = cache.update_and_fetch) -> Any:
            given.append((keys, values))
            return take(keys, values)

        cache.update_and_fetch = noted
    try:
        yield given
    finally:
        for cache in quantised:
            del cache.update_and_fetch
