"""In place of a cache, for one forward over a whole sequence: it hands back what it is given."""

import mlx.core as mx

from .storage import Storage, check_dim, check_storage, decode, encode
from .visibility import EVERYTHING


class NoCache:
    """Keeps nothing, so the keys of a forward are its own tokens, and its mask must say all that a cache would.

    Attributes:
        offset: what RoPE reads: 0, or int32 ``[L]``, the absolute position of each token (for the families whose
            forward takes positions from the cache).
        storage: all but "rows" rounds rows as a cache of that storage does.
    """

    live_start = live_len = 0
    rule = EVERYTHING
    positions = mx.zeros((0,), mx.int32)

    def __init__(self, offset: int | mx.array = 0, storage: Storage = "rows") -> None:
        """Raises ValueError for an unknown ``storage``."""
        check_storage(storage)
        self.offset = offset
        self.storage: Storage = storage

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """``keys [B, H, L, Dk]`` and ``values [B, H, L, Dv]``, as a cache of this storage would return them.

        Raises ValueError where it could not store them.
        """
        for name, rows in (("keys", keys), ("values", values)):
            check_dim(self.storage, name, rows.shape[3])
        first, second = (decode(self.storage, encode(self.storage, rows), rows.dtype) for rows in (keys, values))
        return first, second

    def key_positions(self, l: int) -> mx.array:
        """Positions of the l tokens of a forward, int32 ``[l]``: given, or from ``offset`` on."""
        return self.offset if isinstance(self.offset, mx.array) else mx.arange(self.offset, self.offset + l)
