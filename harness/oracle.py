"""What must be visible, from the ledger alone.

The visibility matrix of a forward is built from absolute positions, never from offsets, lengths or any cache code:
token i sees token j if j was held when i was processed, or came earlier in the same chunk, or is i itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.ledger import Append


def key_positions(append: Append) -> np.ndarray[Any, Any]:
    """Absolute positions of the keys of a forward in slot order: what was held, then the new tokens. [K] int64."""
    return np.concatenate([np.asarray(append.held, np.int64), np.asarray(append.positions, np.int64)])


def visible_set(append: Append) -> np.ndarray[Any, Any]:
    """Boolean [l, K]: may new token i see the key in slot j?

    Everything held is older than every new token, so "held, or earlier in the chunk, or itself" is one comparison of
    absolute positions.
    """
    queries = np.asarray(append.positions, np.int64)
    return key_positions(append)[None, :] <= queries[:, None]
