"""A KV cache of several sequences whose slots lie in blocks: every row has a block table of its own."""

from collections.abc import Sequence
from copy import deepcopy

import mlx.core as mx

from .batch_rows import BatchLengths, Row
from .kv_cache import KVCache
from .paged import PagedKVCache
from .side import check_pair
from .storage import Storage


class BatchPagedKVCache(BatchLengths):
    """Keys and values of a ragged batch of paged caches, which a forward finds through their block tables.

    Nothing is copied when a row joins, stays or leaves but its table: its blocks are shared as with any copy of a
    ``PagedKVCache``, and whoever writes first to one that others have as well takes a copy of it. What attention
    receives is gathered from the blocks, aligned at the right behind zeros, as in ``BatchKVCache``.

    Operations take and return one number for each row. One that raises ValueError has changed nothing.

    Attributes:
        tables: the cache of each row.
        prepared: see ``prepare``.
    """

    def __init__(self, tables: Sequence[PagedKVCache] = ()) -> None:
        """Make a batch of these caches, which it takes over."""
        super().__init__(len(tables))
        self._become(tables)

    @classmethod
    def join(cls, caches: Sequence[KVCache]) -> "BatchPagedKVCache":
        """A batch of solo caches, which stay as they are; arguments and errors as in ``BatchKVCache.join``.

        Their blocks may lie in different pools; whoever leaves has those of the pool that it came with.
        """
        if not caches:
            raise ValueError("a batch is joined of at least one cache")
        tables = [cache for cache in caches if isinstance(cache, PagedKVCache)]
        if len(tables) < len(caches):
            raise ValueError("caches of different kinds in one batch: paged ones and others")
        _check(tables)
        return cls([table.copy() for table in tables])

    @property
    def storage(self) -> Storage:
        """Of all rows; "rows" without any."""
        return self.tables[0].storage if self.tables else "rows"

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks of all rows; of a shared block for everyone who has it."""
        return sum(table.nbytes for table in self.tables)

    def copy(self) -> "BatchPagedKVCache":
        """An independent cache in the same state and the same blocks."""
        return deepcopy(self)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """As ``BatchKVCache.update_and_fetch``; what pads a row at the right comes back as zeros."""
        if (keys.shape[0], values.shape[0]) != (self.batch, self.batch):
            raise ValueError(f"keys {keys.shape} and values {values.shape} for a batch of {self.batch} rows")
        n = keys.shape[2] if keys.ndim == 4 else 0
        lengths = (n,) * self.batch if self.prepared is None else self.prepared
        mine = [(keys[row : row + 1], values[row : row + 1]) for row in range(self.batch)]
        for table, rows in zip(self.tables, mine, strict=True):
            check_pair(*rows, table.storage, table.pool.bound)
        if max(lengths) > n:
            raise ValueError(f"prepared for lengths {list(lengths)}, given {n} tokens a row")
        fetched = []
        for table, padding, length, sides in zip(self.tables, self.padding, lengths, mine, strict=True):
            new = [side[:, :, :length] for side in sides]
            held = [*table.update_and_fetch(*new)] if length else [side for side in table.rows() if side is not None]
            held = held or new  # a row without tokens, old or new
            fetched.append([mx.pad(side, [(0, 0), (0, 0), (padding, n - length), (0, 0)]) for side in held])
        self.prepared = None
        self._become(self.tables)
        return mx.concatenate([sides[0] for sides in fetched]), mx.concatenate([sides[1] for sides in fetched])

    def row(self, row: int) -> tuple[mx.array, mx.array] | tuple[None, None]:
        """As ``BatchKVCache.row``."""
        return self.tables[self._index(row)].rows()

    def filter(self, rows: Sequence[int]) -> tuple[int, ...]:
        """As ``BatchKVCache.filter``; a row that is named twice has its blocks in two tables."""
        self._settled("filter")
        self._become([self.tables[self._index(row)].copy() for row in rows])
        return self.offsets

    def extend(self, other: BatchLengths) -> tuple[int, ...]:
        """As ``BatchKVCache.extend``."""
        self._settled("extend")
        if not isinstance(other, BatchPagedKVCache):
            raise ValueError("caches of different kinds in one batch: paged ones and others")
        other._settled("extend by")
        before = self.batch
        _check([*self.tables, *other.tables])
        self._become([*self.tables, *(table.copy() for table in other.tables)])
        return tuple(range(before, self.batch))

    def extract(self, row: int) -> PagedKVCache:
        """A copy of one row as a cache of its own, in the blocks that it has here. Raises ValueError for a row that is
        not there."""
        self._settled("extract from")
        return self.tables[self._index(row)].copy()

    def trim_front(self, counts: Sequence[int], keep: int | Sequence[int] = 0) -> tuple[int, ...]:
        """As ``BatchKVCache.trim_front``: each row gives its blocks back."""
        self.check_trim_front(counts, keep)
        each = zip(self.tables, counts, self._keeps(keep), strict=True)
        removed = tuple(table.trim_front(n, sinks) for table, n, sinks in each)
        self._become(self.tables)
        return removed

    def rollback(self, counts: Sequence[int]) -> tuple[int, ...]:
        """As ``BatchKVCache.rollback``: each row gives its blocks back."""
        self.check_rollback(counts)
        removed = tuple(table.rollback(n) for table, n in zip(self.tables, counts, strict=True))
        self._become(self.tables)
        return removed

    def _become(self, tables: Sequence[PagedKVCache]) -> None:
        """Be made of these rows, and know their lengths."""
        self.tables = tuple(tables)
        self._rows = tuple(Row(table.offset, table.live_start, table.runs) for table in tables)


def _check(tables: Sequence[PagedKVCache]) -> None:
    """Raise ValueError unless these caches can be rows of one batch."""
    storages = sorted({table.storage for table in tables})
    if len(storages) > 1:
        raise ValueError(f"caches of different storages in one batch: {', '.join(storages)}")
    first = None
    for table in tables:
        if table.pool.bound is None or not table.table:
            continue
        bounds = [side.bound for side in table.pool.bound]
        if bounds[0][0] != 1:
            raise ValueError(f"a row is one sequence: a cache of {bounds[0][0]} cannot join a batch")
        like = [(bound[1:], str(side.dtype)) for bound, side in zip(bounds, table.pool.bound, strict=True)]
        first = first or like
        if like != first:
            raise ValueError(f"rows of (H, D) and dtype {like} cannot stand in a batch with rows of {first}")
