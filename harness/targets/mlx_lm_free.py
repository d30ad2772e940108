"""The forward without a cache of a model that knows positions from one number only: where its first token stands.

A History is a tree: sequences fork, and go back. It is taken apart into paths, each of which is a sequence of
consecutive positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from harness.oracle import Expected, History
from harness.rules import CacheRule

Shown = Callable[..., np.ndarray[Any, Any]]


@dataclass(frozen=True, eq=False)
class PathOfTokens:
    """Consecutive positions from ``first`` on. ``rows``: where its tokens stand in the History; ``slots``: where they
    stand in ``tokens`` [L], int32; ``shown(window, rule)`` [L, L]: what a layer with this window, and a cache
    of this rule, may see.

    A position that nobody sees (it was trimmed before anything rested on it) is filled with a token that sees itself.
    """

    tokens: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    slots: np.ndarray[Any, Any]
    shown: Shown
    first: int


def paths_of(history: History) -> Iterator[PathOfTokens]:
    """As few as hold every token."""
    count = len(history.tokens)
    rests = np.zeros((count, count), bool)  # on whom a token rests, itself included
    for row in range(count):
        rests[row] = rests[history.visible[row]].any(axis=0)
        rests[row, row] = True
    left = np.ones(count, bool)
    while left.any():
        rows = np.flatnonzero(rests[np.flatnonzero(left)[-1]])
        first = int(history.positions[rows].min())
        slots = history.positions[rows] - first
        length = int(slots.max()) + 1
        tokens = np.zeros(length, np.int32)
        tokens[slots] = history.tokens[rows]

        def shown(
            window: int | None,
            rule: CacheRule | None = None,
            rows: Any = rows,
            slots: Any = slots,
            length: int = length,
        ) -> Any:
            seen = np.eye(length, dtype=bool)
            seen[np.ix_(slots, slots)] = history.shown(window, rule)[np.ix_(rows, rows)]
            return seen

        yield PathOfTokens(tokens, rows, slots, shown, first)
        left[rows] = False


def expected_of(history: History, forward: Callable[[PathOfTokens], mx.array]) -> Expected:
    """``forward`` gives logits [1, L, vocab] of a path."""
    logits: np.ndarray[Any, Any] | None = None
    for path in paths_of(history):
        out = np.array(forward(path)[0].astype(mx.float32))
        if logits is None:
            logits = np.zeros((len(history.tokens), out.shape[-1]), np.float32)
        logits[path.rows] = out[path.slots]
    assert logits is not None
    return Expected(logits)


def cache_free(history: History, forward: Callable[[mx.array, Shown, int], mx.array]) -> Expected:
    """``forward(tokens [1, L], shown, offset)`` gives logits [1, L, vocab]; ``offset``: position of the first token."""
    return expected_of(history, lambda path: forward(mx.array(path.tokens[None]), path.shown, path.first))
