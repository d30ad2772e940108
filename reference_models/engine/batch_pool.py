"""A pool one of whose parts is a batch: the sequences in it share one cache per layer."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from .batch_cache import BatchKVCache
from .batch_paged import BatchPagedKVCache
from .kv_cache import KVCache
from .paged import PagedKVCache
from .pool import CachePool, TrimReport

BatchCache = BatchKVCache | BatchPagedKVCache


def join_caches(caches: Sequence[KVCache]) -> BatchCache:
    """A batch of the caches that several sequences have for one layer: see ``join`` of either class."""
    if any(isinstance(cache, PagedKVCache) for cache in caches):
        return BatchPagedKVCache.join(caches)
    return BatchKVCache.join(caches)


class BatchPool(CachePool):
    """``CachePool`` with at most one batch. A sequence in it has no caches of its own until it leaves; trims,
    bounds and rollbacks reach its row, and nothing else may be asked of it."""

    def __init__(self) -> None:
        """Make a pool without sequences."""
        super().__init__()
        self._rows: tuple[int, ...] = ()
        self._batch: tuple[BatchCache, ...] = ()

    @property
    def rows(self) -> tuple[int, ...]:
        """Ids of the sequences in the batch, by row."""
        return self._rows

    @property
    def batch_caches(self) -> tuple[BatchCache, ...]:
        """The caches of the batch, one per attention layer; () without rows."""
        return self._batch

    def batch(self, rows: Sequence[int]) -> int:
        """Let the batch be made of the sequences ``rows``.

        Those that are not named leave it with what their rows hold; of the others those that were in it stay, and the
        new ones join behind them, where they stand in ``rows``.

        Returns:
            The number of caches of the batch: of its layers, 0 when it is empty.

        Raises:
            ValueError: a sequence is named twice, or is model-owned, or an old row comes behind a new one; caches of
                different numbers, kinds, storages or shapes. Nothing is changed then.
            UnknownSequence: one is not open.
        """
        stay, join = [seq for seq in rows if seq in self._rows], [seq for seq in rows if seq not in self._rows]
        if len(set(rows)) != len(rows) or list(rows) != stay + join:
            raise ValueError(f"rows {list(rows)} for a batch of {list(self._rows)}: each once, and the new ones last")
        if any(self.owner(seq) != "pool" for seq in rows):
            raise ValueError(f"rows {list(rows)}: a model-owned sequence cannot join")
        left = {seq: self.caches_of(seq) for seq in self._rows if seq not in stay}
        order = [self._rows.index(seq) for seq in stay]
        whole = [cache.copy() for cache in self._batch] if stay else []  # so that an error leaves all as it was
        for cache in whole:
            cache.filter(order)
        if join:
            joined = [join_caches(layer) for layer in zip(*map(super().forward_caches, join), strict=True)]
            for cache, more in zip(whole, joined, strict=bool(whole)):
                cache.extend(more)
            whole = whole or joined
        for seq, caches in left.items():
            self._replace(seq, caches)
        for seq in join:
            super().reset(seq)  # what it held is in the batch now, and need not be held twice
        self._batch, self._rows = tuple(whole), tuple(rows)
        return len(self._batch)

    def caches_of(self, seq: int) -> tuple[KVCache, ...]:
        """What the sequence holds: its caches, or copies of its row. Raises UnknownSequence."""
        if seq not in self._rows:
            return self.forward_caches(seq)
        return tuple(cache.extract(self._rows.index(seq)) for cache in self._batch)

    def rows_of(self, seq: int) -> list[tuple[mx.array | None, mx.array | None]]:
        """Keys and values ``[1, H, held, D]`` that the sequence holds, of every layer; None where it holds none.
        Raises UnknownSequence."""
        if seq not in self._rows:
            return [cache.rows() for cache in self.forward_caches(seq)]
        return [cache.row(self._rows.index(seq)) for cache in self._batch]

    def positions_of(self, seq: int) -> list[mx.array]:
        """Absolute positions of those rows in their order, of every layer: int32 ``[held]``. Raises UnknownSequence."""
        if seq not in self._rows:
            return [cache.positions for cache in self.forward_caches(seq)]
        return [cache.positions(self._rows.index(seq)) for cache in self._batch]

    def lengths_of(self, seq: int) -> list[tuple[int, int, int]]:
        """offset, live_start and live_len of the sequence in every layer. Raises UnknownSequence."""
        if seq not in self._rows:
            return [(cache.offset, cache.live_start, cache.live_len) for cache in self.forward_caches(seq)]
        row = self._rows.index(seq)
        return [(cache.offsets[row], cache.live_start[row], cache.live_len[row]) for cache in self._batch]

    def memory_of(self, seq: int) -> list[tuple[int, int]]:
        """Bytes that the sequence holds in every layer, and those of one slot; in the batch its share of it, beside
        what its own caches still hold. Raises UnknownSequence."""
        own = [(cache.nbytes, cache.bytes_per_slot) for cache in self.forward_caches(seq)]
        if seq not in self._rows:
            return own
        shares = [_share(cache, self._rows.index(seq)) for cache in self._batch]
        return [(held + share, slot) for (held, _), (share, slot) in zip(own, shares, strict=True)]

    def bounds(self, seq: int) -> tuple[tuple[int, int, int], ...]:
        """As ``CachePool.bounds``, also for a row of the batch (no model-owned sequence is in one)."""
        return tuple(self.lengths_of(seq)) if seq in self._rows else super().bounds(seq)

    def trim_front(self, seq: int, n: int, keep: int = 0) -> TrimReport:
        """As ``CachePool.trim_front``, also for a row of the batch."""
        if seq not in self._rows:
            return super().trim_front(seq, n, keep)
        for cache in self._batch if n > 0 else ():
            cache.check_trim_front(self._counts(seq, n), keep)
        return self._on_row(seq, n, lambda cache, counts: cache.trim_front(counts, keep))

    def rollback(self, seq: int, n: int) -> TrimReport:
        """As ``CachePool.rollback``, also for a row of the batch."""
        if seq not in self._rows:
            return super().rollback(seq, n)
        for cache in self._batch if n > 0 else ():
            cache.check_rollback(self._counts(seq, n))
        return self._on_row(seq, n, lambda cache, counts: cache.rollback(counts))

    def _on_row(self, seq: int, n: int, act: Callable[[BatchCache, list[int]], Any]) -> TrimReport:
        row = self._rows.index(seq)
        return TrimReport(n, tuple(act(cache, self._counts(seq, n))[row] for cache in self._batch))

    def _counts(self, seq: int, n: int) -> list[int]:
        return [n if mine == seq else 0 for mine in self._rows]


def _share(cache: BatchCache, row: int) -> tuple[int, int]:
    """Bytes of the buffers that are a row's share of them, padding included, and of one slot of it."""
    if isinstance(cache, BatchPagedKVCache):
        return cache.tables[row].nbytes, cache.tables[row].bytes_per_slot
    return cache.nbytes // cache.batch, cache.bytes_per_slot // cache.batch
