"""The forward without a cache of a model that knows positions from one number only: where its first token stands.

A History is a tree: sequences fork, and go back. It is taken apart into paths, each of which is a sequence of
consecutive positions. A path of a sequence that is quantised has its rows twice, as they are and as they are read back.
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
    of this rule, may see; where rows are also read as ``storage`` has them, [L, 2 L], those behind the others.

    A position that nobody sees (it was trimmed before anything rested on it) is filled with a token that sees itself.
    """

    tokens: np.ndarray[Any, Any]
    rows: np.ndarray[Any, Any]
    slots: np.ndarray[Any, Any]
    shown: Shown
    first: int
    storage: str = "rows"


def _resting(history: History) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """[S, S]: on whom a token rests, itself included, as it was processed; [S]: does it rest on quantised rows?"""
    count, read_back = len(history.tokens), history.storages != "rows"
    rests, touched = np.zeros((count, count), bool), np.zeros(count, bool)
    for row in range(count):
        seen = history.visible[row]
        others = np.setdiff1d(history.itself[seen], row)
        rests[row] = rests[others].any(axis=0)
        rests[row, history.itself[row]] = True
        touched[row] = read_back[seen].any() or touched[others].any()
    return rests, touched


def paths_of(history: History) -> Iterator[PathOfTokens]:
    """As few as hold every token."""
    rests, _ = _resting(history)
    left = np.zeros(len(history.tokens), bool)
    left[history.processed] = True
    while left.any():
        rows = np.flatnonzero(rests[np.flatnonzero(left)[-1]])
        first = int(history.positions[rows].min())
        slots = history.positions[rows] - first
        length = int(slots.max()) + 1
        tokens = np.zeros(length, np.int32)
        tokens[slots] = history.tokens[rows]
        readings = np.flatnonzero(np.isin(history.itself, rows) & history.visible[rows].any(axis=0))
        storage = next((str(name) for name in history.storages[readings] if name != "rows"), "rows")

        def shown(
            window: int | None,
            rule: CacheRule | None = None,
            rows: Any = rows,
            slots: Any = slots,
            length: int = length,
            readings: Any = readings,
            quantised: bool = storage != "rows",
        ) -> Any:
            seen = np.eye(length, 2 * length if quantised else length, dtype=bool)
            seen[slots, slots] = False
            where = history.positions[readings] - history.positions[rows].min()
            where = where + length * (history.storages[readings] != "rows")
            seen[np.ix_(slots, where)] = history.shown(window, rule)[np.ix_(rows, readings)]
            return seen

        yield PathOfTokens(tokens, rows, slots, shown, first, storage)
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
    gap = np.where(_resting(history)[1], 0.0, np.inf)  # such a row may be rounded either way, and nobody measured it
    return Expected(logits, rounding_gap=gap if (gap == 0).any() else None)


def cache_free(history: History, forward: Callable[[mx.array, Shown, int, str], mx.array]) -> Expected:
    """``forward(tokens [1, L], shown, offset, storage)`` gives logits [1, L, vocab]; ``offset``: position of the first
    token."""
    return expected_of(history, lambda path: forward(mx.array(path.tokens[None]), path.shown, path.first, path.storage))
