"""How a bug is planted: a function of the engine is replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

Patch = Callable[[Any], Any]


def replacing(owner: Any, name: str, make: Patch) -> Callable[[], AbstractContextManager[None]]:
    """A ``plant``: replaces ``owner.name`` by ``make(original)`` and puts it back."""

    @contextmanager
    def plant() -> Iterator[None]:
        original = getattr(owner, name)
        setattr(owner, name, make(original))
        try:
            yield
        finally:
            setattr(owner, name, original)

    return plant


def both(*plants: Callable[[], AbstractContextManager[None]]) -> Callable[[], AbstractContextManager[None]]:
    """Several patches as one."""

    @contextmanager
    def plant() -> Iterator[None]:
        with ExitStack() as stack:
            for each in plants:
                stack.enter_context(each())
            yield

    return plant
