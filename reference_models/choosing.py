"""What every drawer of configurations asks: the chooser, and the choices that all families share."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

MOST_LAYERS = 4
MOST_HEADS = 8


class Choose(Protocol):
    """Picks one of at least one options, which are listed simplest first."""

    def __call__(self, options: Sequence[T], /) -> T: ...


def flag(choose: Choose) -> bool:
    """False, or true."""
    return choose((False, True))


def layers(choose: Choose) -> int:
    """How many layers."""
    return choose(range(1, MOST_LAYERS + 1))


def vocabulary(choose: Choose) -> int:
    """How many tokens there are."""
    return choose((64, 97))


def grouped_heads(choose: Choose) -> tuple[int, int, int]:
    """Query heads, KV heads and the dimensions of a head; at least 16 numbers in all.

    A norm over a handful of numbers that happen to be nearly equal enlarges rounding.
    """
    kv_heads = choose((1, 2, 3, 4))
    heads = kv_heads * choose([ratio for ratio in (1, 2, 3, 4) if kv_heads * ratio <= MOST_HEADS])
    return heads, kv_heads, choose([size for size in (8, 4, 12, 16) if heads * size >= 16])
