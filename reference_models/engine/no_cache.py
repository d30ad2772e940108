"""In place of a cache, for one forward over a whole sequence: it hands back what it is given."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .storage import Storage, check_dim, check_storage, decode, encode
from .visibility import EVERYTHING


class NoCache:
    """Keeps nothing, so the keys of a forward are its own tokens, and its mask must say all that a cache would.

    Attributes:
        offset: what RoPE reads: 0, or int32 ``[L]``, the absolute position of each token (for the families whose
            forward takes positions from the cache).
        storage: all but "rows" rounds rows as a cache of that storage does; or a storage for each of the L tokens.
    """

    live_start = live_len = 0
    rule = EVERYTHING
    positions = mx.zeros((0,), mx.int32)

    def __init__(self, offset: int | mx.array = 0, storage: Storage | Sequence[Storage] = "rows") -> None:
        """Raises ValueError for an unknown ``storage``."""
        for each in (storage,) if isinstance(storage, str) else storage:
            check_storage(each)
        self.offset = offset
        self.storage = storage

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """``keys [B, H, L, Dk]`` and ``values [B, H, L, Dv]``, as a cache of this storage would return them.

        Raises ValueError where it could not store them.
        """
        return self._stored("keys", keys), self._stored("values", values)

    def _stored(self, name: str, rows: mx.array) -> mx.array:
        """Each row as its storage gives it back."""
        given = [self.storage] * rows.shape[2] if isinstance(self.storage, str) else self.storage
        kept = rows
        for storage in dict.fromkeys(given):
            check_dim(storage, name, rows.shape[3])
            here = mx.array([each == storage for each in given])[:, None]
            kept = mx.where(here, decode(storage, encode(storage, rows), rows.dtype), kept)
        return kept

    def key_positions(self, l: int) -> mx.array:
        """Positions of the l tokens of a forward, int32 ``[l]``: given, or from ``offset`` on."""
        return self.offset if isinstance(self.offset, mx.array) else mx.arange(self.offset, self.offset + l)


class _Widths(NoCache):
    """Keeps the widths of what it is given."""

    widths = (0, 0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.widths = keys.shape[3], values.shape[3]
        return keys, values


def row_widths(model: Any) -> tuple[tuple[int, int], ...]:
    """Numbers in a row of keys and of values, as the layers of a reference model give them to their caches."""
    caches = [_Widths() for _ in model.attention_layers]
    model(mx.array([[0]]), caches)  # nothing of it is computed
    return tuple(cache.widths for cache in caches)
