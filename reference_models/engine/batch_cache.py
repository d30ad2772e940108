"""A KV cache of several sequences of different lengths, for one layer."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from types import MappingProxyType
from typing import Any

import mlx.core as mx

from .batch_moves import gathered, in_order, stacked
from .batch_paged import BatchPagedKVCache
from .batch_rows import BatchLengths, Row
from .cache_spec import cache_from_state
from .kv_cache import KVCache
from .side import Side, check_rows
from .storage import Storage, check_storage

DENSE: Mapping[str, Any] = MappingProxyType({})
EMPTY = {"offset": 0, "live_start": 0, "held": [], "dtypes": []}


class BatchKVCache(BatchLengths):
    """Keys and values of a ragged batch: one sequence a row, aligned at the right.

    All rows share their slots, as many as the row with the most holds. Row r begins with ``padding[r]`` dead slots
    (zeros, to be hidden by the mask: see ``batch_masks.batch_mask``), and each of its live slots is, byte for byte,
    what a cache with the history of that row alone would hold, by ascending position.

    The rows of caches with a rule (rotating, chunked) forget as each would alone: at the start of an append, what the
    first new token of the row does not see; a row without a new token forgets nothing. There is no ring: slots keep the
    order of positions, so any rows fit together, wherever in their windows or chunks they stand. What such a cache
    would refuse is refused, by all rows (see ``check_trim_front`` and ``check_rollback``).

    Operations take and return one number for each row. One that raises ValueError or CannotTrim has changed nothing.

    Attributes:
        storage: as in ``KVCache``.
        kind: of the caches that the rows had and have again when they leave, as their ``state`` describes it.
        prepared: see ``prepare``.
    """

    def __init__(self, storage: Storage = "rows", batch: int = 0, kind: Mapping[str, Any] = DENSE) -> None:
        """Make a cache of ``batch`` rows without tokens or buffers. Raises ValueError for an unknown ``storage``, or a
        negative ``batch``."""
        check_storage(storage)
        super().__init__(batch, cache_from_state({}, {"storage": storage, **EMPTY, **kind}).rule)
        self.storage: Storage = storage
        self.kind = dict(kind)
        self._keys: Side | None = None
        self._values: Side | None = None

    @classmethod
    def join(cls, caches: Sequence[KVCache]) -> "BatchKVCache":
        """A batch of solo caches, which stay as they are: row r goes on where ``caches[r]`` stands.

        Any lengths, any trims; positions are kept slot by slot. Buffers of a cache without live tokens do not count.

        Raises:
            ValueError: no caches; different kinds or storages; a cache of more than one sequence; live rows that
                disagree in H, D or the dtype.
        """
        if not caches:
            raise ValueError("a batch is joined of at least one cache")
        return cls._stack([cls._of_one(cache) for cache in caches])

    @property
    def capacity(self) -> int:
        """Allocated slots of every row; 0 when there are no buffers."""
        return 0 if self._keys is None else self._keys.capacity

    @property
    def nbytes(self) -> int:
        """Bytes held in the buffers of keys and values, of all rows, including scales and padding."""
        return sum(side.nbytes for side in (self._keys, self._values) if side is not None)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of the buffers, which all rows have; 0 when there are none."""
        return self.nbytes // self.capacity if self.capacity else 0

    def copy(self) -> "BatchKVCache":
        """An independent cache in the same state."""
        return deepcopy(self)

    def reset(self) -> None:
        """Back to fresh rows, as many as there are: offset 0, no buffers."""
        self._rows = (Row(rule=self.rule),) * self.batch
        self.prepared = self._keys = self._values = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append n tokens to every row, or the real ones of them, and return what attention needs.

        Behind a ``prepare`` the padding is in the arrays returned, and only there: it is not kept, rows are aligned at
        the right again, and no length counts it.

        Args:
            keys: ``[B, Hk, n, Dk]``, float16, bfloat16 or float32.
            values: ``[B, Hv, n, Dv]``, likewise.

        Returns:
            ``(keys, values)``, ``[B, Hk, K + n, Dk]`` and ``[B, Hv, K + n, Dv]`` with the keys of ``key_positions``
            (without a rule K is ``slots`` before the append), in the dtype of the input.

        Raises:
            ValueError: as ``KVCache.update_and_fetch``; B is not the number of rows; n is less than a prepared length.
        """
        check_rows("keys", keys, self.storage, self._keys)
        check_rows("values", values, self.storage, self._values)
        n = keys.shape[2]
        if values.shape[2] != n:
            raise ValueError(f"keys and values disagree in n: {n} and {values.shape[2]}")
        if (keys.shape[0], values.shape[0]) != (self.batch, self.batch):
            raise ValueError(f"keys {keys.shape} and values {values.shape} for a batch of {self.batch} rows")
        lengths = (n,) * self.batch if self.prepared is None else self.prepared
        if max(lengths) > n:
            raise ValueError(f"prepared for lengths {list(lengths)}, given {n} tokens a row")
        if (ready := self._ready()) != self._rows:
            kept = [
                row.seen if length else [range(row.held_len)] for row, length in zip(self._rows, lengths, strict=True)
            ]
            self._rearrange(range(self.batch), ready, kept)
        if self._keys is None or self._values is None:
            self._keys, self._values = Side(self.storage, keys), Side(self.storage, values)
        at, after = self.slots, [row.appended(length) for row, length in zip(self._rows, lengths, strict=True)]
        fetched = self._keys.append(at, keys), self._values.append(at, values)
        self.prepared = None
        if min(lengths) == n:
            self._rows = tuple(after)
        else:
            self._rearrange(range(self.batch), after, _whole(after))
        return fetched

    def rows(self) -> tuple[mx.array, mx.array] | tuple[None, None]:
        """All that is held, ``[B, H, slots, D]`` with zeros for padding; (None, None) without buffers."""
        if self._keys is None or self._values is None:
            return None, None
        return self._keys.held(self.slots), self._values.held(self.slots)

    def filter(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Keep these rows, in this order, and drop padding that none of them needs. A row named twice is there twice.

        Returns the offsets of the rows kept. Raises ValueError for a row that is not there.
        """
        self._settled("filter")
        after = [self._rows[self._index(row)] for row in rows]
        self._rearrange(rows, after, _whole(after))
        return self.offsets

    def extend(self, other: BatchLengths) -> tuple[int, ...]:
        """Put the rows of another batch, which stays as it is, behind ours.

        Returns the numbers of the rows that came in. Raises ValueError for another kind or storage, and for live rows
        that disagree in H, D or the dtype.
        """
        self._settled("extend")
        if not isinstance(other, BatchKVCache):
            raise ValueError("caches of different kinds in one batch: paged ones and others")
        other._settled("extend by")
        both, before = self._stack([self, other]), self.batch
        self._rows, self._keys, self._values = both._rows, both._keys, both._values
        return tuple(range(before, self.batch))

    def extract(self, row: int) -> KVCache:
        """A copy of one row as a cache of its own, of the kind it had: what it would be if it had always been alone.

        Its capacity is the least that holds its live slots, as behind a front trim; one that lived alone may have more
        after a rollback, and one without live tokens may have buffers; a ring that had turned is in order again. Raises
        ValueError for a row that is not there.
        """
        self._settled("extract from")
        padding, end = self.padding[self._index(row)], self.slots
        arrays: dict[str, mx.array] = {}
        dtypes: list[str] = []
        if self._rows[row].held_len:
            for name, side in self._sides():
                live = (array[row : row + 1, :, padding:end] for array in side.arrays)
                arrays |= {f"{name}.{number}": array for number, array in enumerate(live)}
                dtypes.append(str(side.dtype).removeprefix("mlx.core."))
        told = {"storage": self.storage, **self._rows[row].told(), "dtypes": dtypes}
        return cache_from_state(arrays, told | self.kind)

    def row(self, row: int) -> tuple[mx.array, mx.array] | tuple[None, None]:
        """What one row holds, ``[1, H, held_len, D]`` in the order of ``positions``; (None, None) where that is
        nothing. Raises ValueError for a row that is not there."""
        keys, values = self.rows()
        if keys is None or values is None or not self._rows[self._index(row)].held_len:
            return None, None
        padding = self.padding[row]
        return keys[row : row + 1, :, padding:], values[row : row + 1, :, padding:]

    def trim_front(self, counts: Sequence[int], keep: int | Sequence[int] = 0) -> tuple[int, ...]:
        """Front-trim each row as its own cache would, and compact the slots that all share.

        Args:
            counts: tokens to drop of each row, clamped to ``offset - live_start``: without a rule, what it holds.
            keep: sinks of each row, or of every row, in slots, clamped likewise.

        Returns:
            The number of tokens removed from each row.

        Raises:
            ValueError: not one number for each row, or a negative one.
            CannotTrim: the cache of a row would refuse.
        """
        self.check_trim_front(counts, keep)
        removed = tuple(min(n, row.tokens) for n, row in zip(counts, self._rows, strict=True))
        if any(removed):
            trimmed = [
                row.trimmed(n, min(sinks, row.tokens - n))
                for row, n, sinks in zip(self._rows, removed, self._keeps(keep), strict=True)
            ]
            self._rearrange(range(self.batch), [row for row, _ in trimmed], [slots for _, slots in trimmed])
        return removed

    def rollback(self, counts: Sequence[int]) -> tuple[int, ...]:
        """Drop the newest tokens of each row: its offset falls.

        When all rows lose as many, or all they have, only the end of the slots moves and buffers stay, as in
        ``KVCache``; otherwise rows are aligned anew.

        Args:
            counts: tokens to drop of each row, clamped as in ``trim_front``.

        Returns:
            The number of tokens removed from each row.

        Raises:
            ValueError: not one number for each row, or a negative one.
            CannotTrim: the cache of a row would refuse.
        """
        self.check_rollback(counts)
        removed = tuple(min(n, row.tokens) for n, row in zip(counts, self._rows, strict=True))
        after = [row.rolled_back(n) for row, n in zip(self._rows, removed, strict=True)]
        gone = {row.held_len - left.held_len for row, left in zip(self._rows, after, strict=True)}
        if len(gone) <= 1 or not any(row.held_len for row in after):
            self._rows = tuple(after)
        else:
            self._rearrange(range(self.batch), after, _whole(after))
        return removed

    def state(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """All that makes this cache, as ``KVCache.state``: the slots as they are stored ``[B, H, slots, *]``, none
        without live tokens; and ``kind`` ("batch"), ``of`` (the kind of the rows), ``storage``, ``rows`` (see
        ``Row.told``) and ``dtypes``. ValueError for a prepared cache."""
        self._settled("save")
        sides = self._sides() if self.slots else ()
        arrays = {
            f"{name}.{number}": array for name, side in sides for number, array in enumerate(side.live(self.slots))
        }
        dtypes = [str(side.dtype).removeprefix("mlx.core.") for _, side in sides]
        rows = [row.told() for row in self._rows]
        return arrays, {"kind": "batch", "of": self.kind, "storage": self.storage, "rows": rows, "dtypes": dtypes}

    @classmethod
    def from_state(cls, arrays: dict[str, mx.array], metadata: dict[str, Any]) -> "BatchKVCache":
        """Inverse of ``state``; capacity is the least. ValueError where arrays and metadata do not belong together."""
        cache = cls(metadata["storage"], kind=metadata["of"])
        cache._rows = tuple(Row.of(told, cache.rule) for told in metadata["rows"])
        shapes = {(array.shape[0], array.shape[2]) for array in arrays.values()}
        if shapes != ({(cache.batch, cache.slots)} if cache.slots else set()):
            raise ValueError(f"arrays of (rows, slots) {sorted(shapes)} for {cache.batch} rows in {cache.slots} slots")
        if arrays:
            count = len(arrays) // 2
            cache._keys, cache._values = (
                Side.of(cache.storage, getattr(mx, dtype), [arrays[f"{name}.{number}"] for number in range(count)])
                for name, dtype in zip(("keys", "values"), metadata["dtypes"], strict=True)
            )
        return cache

    @classmethod
    def _of_one(cls, cache: KVCache) -> "BatchKVCache":
        """A batch of one row, from a solo cache."""
        arrays, told = in_order(cache)
        kind = {name: told[name] for name in told if name not in ("storage", *EMPTY)}
        row = {name: told[name] for name in ("offset", "live_start", "held")}
        told = {"storage": cache.storage, "of": kind, "rows": [row], "dtypes": told["dtypes"]}
        return cls.from_state(arrays, told)

    @classmethod
    def _stack(cls, batches: Sequence["BatchKVCache"]) -> "BatchKVCache":
        """The rows of all batches behind each other. ValueError for different kinds and for rows that differ."""
        storages = sorted({batch.storage for batch in batches})
        if len(storages) > 1:
            raise ValueError(f"caches of different storages in one batch: {', '.join(storages)}")
        if odd := [batch.kind for batch in batches if batch.kind != batches[0].kind]:
            raise ValueError(f"caches of different kinds in one batch: {batches[0].kind} and {odd[0]}")
        whole = cls(batches[0].storage, kind=batches[0].kind)
        whole._rows = tuple(row for batch in batches for row in batch._rows)
        whole._keys = stacked([(batch._keys, batch.slots, batch.batch) for batch in batches], whole.slots)
        whole._values = stacked([(batch._values, batch.slots, batch.batch) for batch in batches], whole.slots)
        return whole

    def _rearrange(self, rows: Sequence[int], after: Sequence[Row], kept: Sequence[Sequence[range]]) -> None:
        """Become ``after``: its row i keeps the live slots ``kept[i]`` (padding not counted) of our row ``rows[i]``."""
        slots = max((row.held_len for row in after), default=0)
        keys, values = self._keys, self._values
        if keys is not None and values is not None:
            padding = self.padding
            starts = [padding[row] for row in rows]
            source = [
                [range(start + run.start, start + run.stop) for run in runs]
                for start, runs in zip(starts, kept, strict=True)
            ]
            new = [gathered(side, rows, source, slots) if slots else None for side in (keys, values)]
            self._keys, self._values = new
        self._rows = tuple(after)

    def _sides(self) -> tuple[tuple[str, Side], ...]:
        if self._keys is None or self._values is None:
            return ()
        return ("keys", self._keys), ("values", self._values)


def _whole(rows: Sequence[Row]) -> list[list[range]]:
    """The first live slots, as many as each of these rows holds."""
    return [[range(row.held_len)] for row in rows]


Cache = KVCache | BatchKVCache | BatchPagedKVCache
"""What a model reads and writes: one sequence (or several in step), or a ragged batch."""
