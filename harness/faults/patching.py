"""How a bug is planted: a function of the engine is replaced, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

Patch = Callable[[Any], Any]


def replacing(owner: Any, name: str, make: Patch) -> Callable[[], AbstractContextManager[None]]:
    """A ``plant``: replaces ``owner.name`` by ``make(original)`` and puts it back.

    What ``owner`` inherits is inherited again afterwards: left behind as its own, it would hide whatever is planted in
    the class that it comes from.
    """

    @contextmanager
    def plant() -> Iterator[None]:
        original, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, make(original))
        try:
            yield
        finally:
            if own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

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
