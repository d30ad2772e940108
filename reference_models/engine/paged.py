"""A dense cache whose slots lie in blocks of a pool, shared by copies until one of them writes."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .blocks import BlockPool
from .kv_cache import KVCache
from .runs import joined
from .side import Storage
from .storage import check_dim, decode, dim_of, encode


class PagedKVCache(KVCache):
    """What is held, seen, trimmed and rolled back is that of a ``KVCache``; where it lies is another matter.

    ``table`` lists the blocks in the order of their slots; slot i is number ``first + i`` of all their slots.

    * A copy has the same blocks. Whoever writes first to a block that others have as well, takes a copy of it.
    * A front trim gives whole blocks back and leaves an offset in the first. Keeping sinks moves what stays into blocks
      of its own.
    * A rollback gives the blocks behind the last token back (a ``KVCache`` keeps its buffers).
    * A cache that nobody refers to any more gives its blocks back.

    Attributes:
        pool: where the blocks are; its storage is that of the cache.
        table: numbers of the blocks.
        first: where slot 0 lies in the first block; below ``pool.block``.
    """

    def __init__(self, pool: BlockPool) -> None:
        """Make an empty cache without blocks."""
        super().__init__(pool.storage)
        self.pool = pool
        self.table: list[int] = []
        self.first = 0

    @property
    def capacity(self) -> int:
        """Slots of the blocks of this cache, those before ``first`` and shared ones included."""
        return len(self.table) * self.pool.block

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks of this cache; of a shared block for everyone who has it."""
        return self.capacity * self.pool.bytes_per_slot

    def copy(self) -> "PagedKVCache":
        """An independent cache in the same state and the same blocks, which nobody copies before someone writes."""
        twin = PagedKVCache(self.pool)
        twin.offset, twin.live_start, twin._held = self.offset, self.live_start, list(self._held)
        twin.table, twin.first = list(self.table), self.first
        self.pool.share(twin.table)
        return twin

    def __copy__(self) -> "PagedKVCache":
        """As ``copy``: two caches with one table would free its blocks twice."""
        return self.copy()

    def __deepcopy__(self, memo: dict[int, object]) -> "PagedKVCache":
        """As ``copy``: the pool is not copied."""
        return self.copy()

    def __del__(self) -> None:
        """Give the blocks back."""
        self._give_back(getattr(self, "table", []))

    def reset(self) -> None:
        """Back to a fresh cache: offset 0, no blocks."""
        super().reset()
        self._truncate(0)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As ``KVCache.update_and_fetch``; B, H, D and the dtype are bound while any block of the pool is in use."""
        self.pool.bind(keys, values)
        self._append(keys.shape[2], [encode(self.storage, rows) for rows in (keys, values)])
        return self._read()

    def rows(self) -> tuple[mx.array, mx.array] | tuple[None, None]:
        """All that is held, in the order of ``positions``; (None, None) without blocks."""
        return self._read() if self.table else (None, None)

    def rollback(self, n: int) -> int:
        """As ``KVCache.rollback``, and the blocks behind go back to the pool."""
        n = super().rollback(n)
        self._truncate(self.held_len)
        return n

    def to_storage(self, storage: Storage) -> "PagedKVCache":
        """As ``KVCache.to_storage``; the quantised cache has a pool of its own."""
        self._check_to_storage(storage)
        rows = self.rows()
        twin = PagedKVCache(BlockPool(self.pool.block, storage))
        if rows[0] is not None and rows[1] is not None:
            for name, side in zip(("keys", "values"), rows, strict=True):
                check_dim(storage, name, side.shape[3])
            twin.update_and_fetch(*rows)
        twin.offset, twin.live_start, twin._held = self.offset, self.live_start, list(self._held)
        return twin

    def _append(self, n: int, stored: Sequence[Sequence[mx.array]]) -> None:
        at = self.held_len
        full, inside = divmod(self.first + at, self.pool.block)
        if inside:
            self.table[full] = self.pool.own(self.table[full])
        self.table += self.pool.take(-(-(self.first + at + n) // self.pool.block) - len(self.table))
        self._held = joined([*self._held, range(self.offset, self.offset + n)])
        self.offset += n
        self.pool.write(self._slots(at, at + n), stored)

    def _drop(self, first: int, last: int, live: int) -> None:
        """Keep slots ``[0, first) ++ [last, live)``."""
        if first == 0:
            blocks, self.first = divmod(self.first + last, self.pool.block)
            if last == live:
                blocks, self.first = len(self.table), 0
            self._give_back(self.table[:blocks])
            self.table = self.table[blocks:]
            return
        kept = mx.concatenate([self._slots(0, first), self._slots(last, live)])
        stored = self.pool.read(kept)
        self._truncate(0)
        self.table = self.pool.take(-(-kept.size // self.pool.block))
        self.pool.write(self._slots(0, kept.size), stored)

    def _truncate(self, live: int) -> None:
        """Give the blocks behind the first ``live`` slots back."""
        blocks = -(-(self.first + live) // self.pool.block) if live else 0
        behind, self.table = self.table[blocks:], self.table[:blocks]
        self.first = self.first if live else 0
        self._give_back(behind)

    def _give_back(self, blocks: list[int]) -> None:
        if blocks:
            self.pool.release(blocks)

    def _slots(self, first: int, last: int) -> mx.array:
        """Where slots ``[first, last)`` lie in the pool: int32 ``[last - first]``."""
        block = self.pool.block
        slots = mx.array(self.table, mx.int32)[:, None] * block + mx.arange(block, dtype=mx.int32)
        return slots.flatten()[self.first + first : self.first + last]

    def _read(self) -> tuple[mx.array, mx.array]:
        (keys, key_dtype), (values, value_dtype) = self._stored()
        return decode(self.storage, keys, key_dtype), decode(self.storage, values, value_dtype)

    def _stored(self) -> list[tuple[list[mx.array], mx.Dtype]]:
        if not self.held_len:
            return []
        return list(zip(self.pool.read(self._slots(0, self.held_len)), self.pool.dtypes, strict=True))

    def _restore(self, stored: list[tuple[list[mx.array], mx.Dtype]]) -> None:
        lengths = self.offset, self.live_start, self._held
        keys, values = (
            mx.zeros((*arrays[0].shape[:3], dim_of(self.storage, arrays[0].shape[3])), dtype)
            for arrays, dtype in stored
        )
        self.pool.bind(keys, values)
        self._held = []
        self._append(keys.shape[2], [arrays for arrays, _ in stored])
        self.offset, self.live_start, self._held = lengths

    @classmethod
    def _fresh(cls, metadata: dict[str, Any]) -> "PagedKVCache":
        return cls(BlockPool(metadata["block"], metadata["storage"]))

    def _made_by(self) -> dict[str, Any]:
        return {"kind": "paged", "block": self.pool.block}
