"""The forward without a cache of a model that knows positions from one number only: where its first token stands.

A History is a tree: sequences fork, and go back. It is taken apart into paths, each of which is a sequence of
consecutive positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from harness.oracle import Expected, History

Shown = Callable[[int | None], np.ndarray[Any, Any]]


def cache_free(history: History, forward: Callable[[mx.array, Shown, int], mx.array]) -> Expected:
    """``forward(tokens [1, L], shown, offset)`` gives logits [1, L, vocab]; ``shown(window)`` [L, L] is what a layer
    with this window may see, ``offset`` the position of the first token.

    A position that nobody sees (it was trimmed before anything rested on it) is filled with a token that sees itself.
    """
    count = len(history.tokens)
    rests = np.zeros((count, count), bool)  # on whom a token rests, itself included
    for row in range(count):
        rests[row] = rests[history.visible[row]].any(axis=0)
        rests[row, row] = True
    logits: np.ndarray[Any, Any] | None = None
    left = np.ones(count, bool)
    while left.any():
        rows = np.flatnonzero(rests[np.flatnonzero(left)[-1]])
        first = int(history.positions[rows].min())
        slots = history.positions[rows] - first
        length = int(slots.max()) + 1
        tokens = np.zeros(length, np.int32)
        tokens[slots] = history.tokens[rows]

        def shown(window: int | None, rows: Any = rows, slots: Any = slots, length: int = length) -> Any:
            seen = np.eye(length, dtype=bool)
            seen[np.ix_(slots, slots)] = history.shown(window)[np.ix_(rows, rows)]
            return seen

        out = np.array(forward(mx.array(tokens[None]), shown, first)[0].astype(mx.float32))
        if logits is None:
            logits = np.zeros((count, out.shape[-1]), np.float32)
        logits[rows] = out[slots]
        left[rows] = False
    assert logits is not None
    return Expected(logits)
