"""Bugs planted in caches that forget by a rule: a comparison that would not see them is worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import pytest

from reference_models import registry, rope
from reference_models.engine import RotatingKVCache, Storage
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


BUGS: dict[str, list[tuple[Any, str, Callable[[Any], Any]]]] = {
    "window one larger": [(RotatingKVCache, "__init__", _window_one_larger)],
    "missing cut": [(RuledKVCache, "_seen_from", _no_cut)],
    "ring cursor one off": [(RotatingKVCache, "_overwritten", _cursor_one_off)],
    "ring cursor used as position": [
        (rope, "rotate", _cursor_as_position),
        (rope, "text_position_ids", _cursor_as_mrope_position),
    ],
}


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_a_planted_bug_shows(family: str, bug: str) -> None:
    variant, spec = registry.variants(family)[-1], SPECS[0]
    program = CUTS[2]
    assert run(variant, spec, program).error() <= 1e-5
    with ExitStack() as planted:
        for each in BUGS[bug]:
            planted.enter_context(_patched(*each))
        error = run(variant, spec, program).error()
    assert error > 0.01
