"""In place of a cache, for one forward over a whole sequence: it hands back what it is given."""

from typing import get_args

import mlx.core as mx

from .int8 import dequantise_rows, quantise_rows
from .kv_cache import Storage
from .visibility import EVERYTHING


class NoCache:
    """Keeps nothing, so the keys of a forward are its own tokens, and its mask must say all that a cache would.

    Attributes:
        offset: what RoPE reads: 0, or int32 ``[L]``, the absolute position of each token (for the families whose
            forward takes positions from the cache).
        storage: "int8" rounds rows as an Int8 cache does.
    """

    live_start = live_len = 0
    rule = EVERYTHING
    positions = mx.zeros((0,), mx.int32)

    def __init__(self, offset: int | mx.array = 0, storage: Storage = "rows") -> None:
        """Raises ValueError for an unknown ``storage``."""
        if storage not in get_args(Storage):
            raise ValueError(f"unknown storage {storage!r}: expected one of {get_args(Storage)}")
        self.offset = offset
        self.storage: Storage = storage

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """``keys [B, H, L, Dk]`` and ``values [B, H, L, Dv]``, as a cache of this storage would return them."""
        if self.storage == "rows":
            return keys, values
        first, second = (dequantise_rows(*quantise_rows(rows), rows.dtype) for rows in (keys, values))
        return first, second

    def key_positions(self, l: int) -> mx.array:
        """Positions of the l tokens of a forward, int32 ``[l]``: given, or from ``offset`` on."""
        return self.offset if isinstance(self.offset, mx.array) else mx.arange(self.offset, self.offset + l)
