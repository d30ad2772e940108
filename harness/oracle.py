"""What must be visible, from the ledger alone.

The visibility matrix of a forward is built from absolute positions, never from offsets, lengths or any cache code:
token i sees token j if j was held when i was processed, or came earlier in the same chunk, or is i itself; and, on a
layer with a sliding window of w, if also i - j < w.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.ledger import Append


def key_positions(append: Append) -> np.ndarray[Any, Any]:
    """Absolute positions of the keys of a forward in slot order: what was held, then the new tokens. [K] int64."""
    return np.concatenate([np.asarray(append.held, np.int64), np.asarray(append.positions, np.int64)])


def visible_set(append: Append, window: int | None = None) -> np.ndarray[Any, Any]:
    """Boolean [l, K]: may new token i see the key in slot j, on a layer with this window (in tokens, >= 1; None: none)?

    Everything held is older than every new token, so "held, or earlier in the chunk, or itself" is one comparison of
    absolute positions.  The window is another, of the distance between them, whatever was trimmed in between: it is the
    distance that RoPE shows.
    """
    behind: np.ndarray[Any, Any] = np.asarray(append.positions, np.int64)[:, None] - key_positions(append)[None, :]
    visible: np.ndarray[Any, Any] = behind >= 0
    return visible if window is None else visible & (behind < window)
