"""What a cache forgets by a rule of its own, by absolute position; and which rows a quantised one can take.

A rotating cache keeps the newest keys of a window, and sinks in front of them; a chunked one the keys of its last
chunk, or more of them than it shows. The ledger knows the rule alone, and nothing of rings and slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

QuantisedStorage = Literal["int8", "affine8", "affine4"]
"""``int8``: symmetric, one fp16 scale a row; ``affine8``, ``affine4``: with 8 or 4 bits, a scale and a bias for every
``GROUP`` numbers of a row. (``rows``: as given.)"""

GROUP = 32


def fits(storage: str, width: int) -> bool:
    """Can rows of so many numbers be stored so?"""
    return not storage.startswith("affine") or width % GROUP == 0


def fits_all(widths: Iterable[tuple[int, int]]) -> bool:
    """Can rows of these widths, of keys and of values, be stored in every way there is?"""
    return all(fits(storage, width) for storage in get_args(QuantisedStorage) for both in widths for width in both)


@dataclass(frozen=True)
class CacheRule:
    """A token at q sees the key at p <= q iff, where these are set, ``p < sinks or p > q - (window - sinks)`` and
    ``p // chunk == q // chunk``. ``window``: keys that are seen at most, the token's own and the sinks included.
    ``rewinds``: it goes back wherever nothing that would be needed is gone; one that does not goes back only as long as
    its window is not full. ``keeps``: an append keeps so many of the newest keys, seen or not (never fewer than are
    seen), and a rollback goes back over those alone; None: it keeps those that its first token sees. ``states``: other
    layers remember tokens in states, so that nothing ever goes back."""

    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    rewinds: bool = True
    keeps: int | None = None
    states: bool = False

    @property
    def forgets(self) -> bool:
        """Does a key ever leave by it?"""
        return self.window is not None or self.chunk is not None

    def stuck(self, offset: int, n: int, kept: int) -> bool:
        """Does a cache with ``kept`` keys refuse to go back ``n`` from ``offset``, whatever would be seen then?"""
        turned = not self.rewinds and self.window is not None and offset >= self.window
        return self.states or turned or (self.keeps is not None and n > kept)

    def shows(self, query: int, key: int) -> bool:
        """Does the token at ``query`` see the key at ``key``, which is not behind it?"""
        near = self.window is None or key < self.sinks or key > query - (self.window - self.sinks)
        return near and (self.chunk is None or key // self.chunk == query // self.chunk)

    def seen_from(self, query: int, held: Iterable[int]) -> tuple[int, ...]:
        """Those of the keys ``held``, all older, that the token at ``query`` sees. What it does not see no later token
        will see either, so an append that begins with it need not keep the others."""
        return tuple(key for key in held if self.shows(query, key))

    def kept_from(self, query: int, held: Sequence[int]) -> tuple[int, ...]:
        """Those of the keys ``held``, ascending, that an append keeps which begins at ``query``."""
        return self.seen_from(query, held) if self.keeps is None else tuple(held[-self.keeps :])


Run = tuple[int, int]
"""Positions that follow each other: the first, and the one behind the last."""


def runs_of(positions: Sequence[int]) -> tuple[Run, ...]:
    """Ascending positions, run by run."""
    if positions and positions[-1] - positions[0] == len(positions) - 1:  # nearly always
        return ((positions[0], positions[-1] + 1),)
    runs: list[Run] = []
    for position in positions:
        if runs and runs[-1][1] == position:
            runs[-1] = runs[-1][0], position + 1
        else:
            runs.append((position, position + 1))
    return tuple(runs)
