"""Bugs planted in caches that forget by a rule: a comparison that would not see them is worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import pytest

from reference_models import registry, rope
from reference_models.engine import (
    BlockPool,
    CacheSpec,
    ChunkedKVCache,
    PagedKVCache,
    RotatingKVCache,
    Storage,
    VisibilityRule,
)
from reference_models.engine.ruled import RuledKVCache
from reference_models.engine.runs import found
from tests.reference_models.cache_runs import CUTS, SPECS, run


@contextmanager
def _patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, change(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _window_one_larger(original: Any) -> Any:
    def init(self: Any, window: int, sinks: int = 0, storage: Storage = "rows") -> None:
        original(self, window + 1, sinks, storage)

    return init


def _no_cut(original: Any) -> Any:
    return lambda self, query: found(self._held, [range(query)])


def _cursor_one_off(original: Any) -> Any:
    def overwritten(self: Any, n: int) -> int | None:
        slot = original(self, n)
        return slot if slot is None else self.sinks + (slot - self.sinks + 1) % (self.window - self.sinks)

    return overwritten


def _cursor_as_position(original: Any) -> Any:
    return lambda x, offset, *rest: original(x, offset if isinstance(offset, mx.array) else offset % 5, *rest)


def _cursor_as_mrope_position(original: Any) -> Any:
    return lambda offset, *rest: original(offset % 5, *rest)


def _chunk_one_longer(original: Any) -> Any:
    return lambda self, chunk, *rest: original(self, chunk + 1, *rest)


def _never_drops_a_chunk(original: Any) -> Any:
    return lambda self, query: tuple(range(part.stop) for part in original(self, query)) or (range(query),)


def _writes_to_shared_blocks(original: Any) -> Any:
    return lambda self, block: block


def _forgets_the_offset_in_the_first_block(original: Any) -> Any:
    def slots(self: Any, first: int, last: int) -> mx.array:
        return original(self, first - self.first, last - self.first) if self.first else original(self, first, last)

    return slots


def _frees_a_block_too_many(original: Any) -> Any:
    """And writes on in whatever block comes next."""

    def truncate(self: Any, live: int) -> None:
        original(self, live)
        if live and len(self.table) > 1:
            self.pool.release([self.table[0]])
            self.table[:1] = self.pool.take(2)[1:]

    return truncate


BUGS: dict[str, list[tuple[Any, str, Callable[[Any], Any]]]] = {
    "window one larger": [(RotatingKVCache, "__init__", _window_one_larger)],
    "missing cut": [(RuledKVCache, "_seen_from", _no_cut)],
    "ring cursor one off": [(RotatingKVCache, "_overwritten", _cursor_one_off)],
    "ring cursor used as position": [
        (rope, "rotate", _cursor_as_position),
        (rope, "text_position_ids", _cursor_as_mrope_position),
    ],
}
RING = CUTS[2]
CHUNKED, PAGED = CacheSpec("chunked", chunk=4), CacheSpec("paged", block=4)
FORKED = [("forward", 6), ("go_on_with_copies",), ("forward", 2), ("decode", 2)]
OTHERS: dict[str, tuple[CacheSpec, list[tuple[Any, ...]], Any, str, Callable[[Any], Any]]] = {
    "chunk one longer": (CHUNKED, CUTS[3], ChunkedKVCache, "__init__", _chunk_one_longer),
    "missing drop of a chunk": (CHUNKED, CUTS[1], VisibilityRule, "before", _never_drops_a_chunk),
    "copies share what one writes": (PAGED, FORKED, BlockPool, "own", _writes_to_shared_blocks),
    "front trim forgets its place in the block": (
        PAGED,
        [("forward", 9), ("trim", 3), ("forward", 4)],
        PagedKVCache,
        "_slots",
        _forgets_the_offset_in_the_first_block,
    ),
    "a stale block in the table": (
        PAGED,
        [("forward", 11), ("rollback", 1), ("forward", 4)],
        PagedKVCache,
        "_truncate",
        _frees_a_block_too_many,
    ),
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_a_planted_bug_shows(family: str, bug: str) -> None:
    variant, spec = registry.variants(family)[-1], SPECS[0]
    assert run(variant, spec, RING).error() <= 1e-5
    with ExitStack() as planted:
        for each in BUGS[bug]:
            planted.enter_context(_patched(*each))
        error = run(variant, spec, RING).error()
    assert error > 0.01


@pytest.mark.parametrize("bug", OTHERS)
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_a_bug_planted_in_chunks_or_blocks_shows(family: str, bug: str) -> None:
    variant = registry.variants(family)[-1]
    spec, program, *place = OTHERS[bug]
    assert run(variant, spec, program).error() <= 1e-5
    with _patched(*place):
        error = run(variant, spec, program).error()
    assert error > 0.01
