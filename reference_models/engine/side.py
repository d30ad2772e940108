"""The buffers of one side of a cache: rows, or quantised rows with their scales (and biases)."""

from collections.abc import Callable, Sequence
from copy import copy

import mlx.core as mx

from .storage import Storage as Storage
from .storage import check_dim, decode, dim_of, encode, layout

_ROW_DTYPES = (mx.float16, mx.bfloat16, mx.float32)

GROWTH = 256
"""Quantum of the allocation, in slots."""


class Side:
    """Buffers of the keys, or of the values.

    ``arrays`` is what ``storage.encode`` makes of rows (``[rows]``, ``[q, scales]``, ...), each
    ``[B, H, capacity, *]``. Every move of slots is a loop over all of them, so that scales cannot fall out of step
    with their rows.

    ``limit``: slots above which the capacity is not rounded up, for caches that seldom need more; None rounds always.
    """

    def __init__(self, storage: Storage, like: mx.array, limit: int | None = None) -> None:
        batch, heads, _, dim = like.shape
        self.storage = storage
        self.limit = limit
        self.dtype = like.dtype
        self.bound = (batch, heads, dim)
        self.arrays = [mx.zeros((batch, heads, 0, width), dtype) for width, dtype in layout(storage, dim, like.dtype)]

    def __deepcopy__(self, memo: dict[int, object]) -> "Side":
        """A copy that shares nothing (an mx.Dtype cannot be deep-copied).

        An array copy is cheap: MLX shares the data until one array object is written to, and a write replaces the data
        of that object only.
        """
        twin = copy(self)
        twin.arrays = [mx.array(array) for array in self.arrays]
        return twin

    @classmethod
    def of(cls, storage: Storage, dtype: mx.Dtype, arrays: list[mx.array], limit: int | None = None) -> "Side":
        """A side whose slots are all live: ``arrays`` as ``live`` gives them, with at least one slot, of rows that were
        given in ``dtype``."""
        batch, heads, slots, width = arrays[0].shape
        side = cls(storage, mx.zeros((batch, heads, 0, dim_of(storage, width)), dtype), limit)
        side.arrays = arrays
        side._reallocate(slots, lambda old: [old])
        mx.eval(side.arrays)  # the file that they come from may be gone by the time that somebody reads them
        return side

    def live(self, end: int) -> list[mx.array]:
        """Slots ``[0, end)`` of every array as they are stored."""
        return [array[:, :, :end] for array in self.arrays]

    @property
    def capacity(self) -> int:
        return int(self.arrays[0].shape[2])

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays)

    def append(self, at: int, rows: mx.array) -> mx.array:
        """Write ``rows`` ``[B, H, n, D]`` from slot ``at`` on; return ``held(at + n)``."""
        end = at + rows.shape[2]
        self.reserve(end, at)
        self.write(at, rows)
        return self.held(end)

    def reserve(self, slots: int, used: int) -> None:
        """Make room for ``slots``, of which the first ``used`` are to be kept."""
        if slots > self.capacity:
            self._reallocate(slots, lambda old: [old[:, :, :used]])

    def write(self, at: int, rows: mx.array) -> None:
        """Write ``rows`` ``[B, H, n, D]`` over the slots from ``at`` on, which are allocated."""
        for array, part in zip(self.arrays, encode(self.storage, rows), strict=True):
            array[:, :, at : at + rows.shape[2]] = part

    def held(self, end: int) -> mx.array:
        """Slots ``[0, end)``, dequantised."""
        return decode(self.storage, self.live(end), self.dtype)

    def to_storage(self, storage: Storage) -> "Side":
        """A side of as many slots that stores these rows otherwise; this one holds them as they were given."""
        twin = copy(self)
        twin.storage, twin.arrays = storage, encode(storage, self.arrays[0])
        mx.eval(twin.arrays)  # so that the rows can go
        return twin

    def drop_slots(self, first: int, last: int, live: int) -> None:
        """Keep slots ``[0, first) ++ [last, live)`` in buffers of the least capacity."""
        self.take([range(first), range(last, live)])
        # Evaluated now: a lazy copy would hold the old, larger buffer until somebody reads it.
        mx.eval(self.arrays)

    def take(self, slots: Sequence[range]) -> None:
        """Keep ``slots``, in that order, in buffers of the least capacity."""
        self._reallocate(sum(map(len, slots)), lambda old: [old[:, :, part.start : part.stop] for part in slots])

    def _reallocate(self, slots: int, pieces: Callable[[mx.array], list[mx.array]]) -> None:
        """Move ``pieces`` of every array to new buffers of ``slots`` rounded up to the quantum."""
        capacity = -(-slots // GROWTH) * GROWTH
        if self.limit is not None:
            capacity = min(capacity, max(slots, self.limit))
        for index, old in enumerate(self.arrays):
            # Copied into fresh zeros: a slice (or a concatenation of one piece) may be a view that keeps
            # the whole old buffer alive.
            new = mx.zeros((*old.shape[:2], capacity, old.shape[3]), old.dtype)
            at = 0
            for piece in pieces(old):
                if piece.shape[2] > 0:
                    new[:, :, at : at + piece.shape[2]] = piece
                    at += piece.shape[2]
            self.arrays[index] = new


def check_pair(keys: mx.array, values: mx.array, storage: Storage, sides: tuple[Side, Side] | None) -> None:
    """Raise ValueError unless these rows can be appended together to ``sides``, or to new ones of this storage."""
    check_rows("keys", keys, storage, sides and sides[0])
    check_rows("values", values, storage, sides and sides[1])
    if keys.shape[0] != values.shape[0] or keys.shape[2] != values.shape[2]:
        raise ValueError(
            f"keys and values disagree in B or n: keys {keys.shape} have B={keys.shape[0]}, "
            f"n={keys.shape[2]}; values {values.shape} have B={values.shape[0]}, n={values.shape[2]}"
        )


def check_rows(name: str, rows: mx.array, storage: Storage, side: Side | None) -> None:
    """Raise ValueError unless ``rows`` can be appended to ``side``, or to a new one of this storage."""
    if rows.ndim != 4:
        raise ValueError(f"{name} must have 4 axes [B, H, n, D], got shape {rows.shape}")
    if 0 in rows.shape:
        raise ValueError(f"{name} {rows.shape} have an empty axis: B, H, n and D must be >= 1")
    if rows.dtype not in _ROW_DTYPES:
        raise ValueError(f"{name} are {rows.dtype}: expected float16, bfloat16 or float32")
    batch, heads, _, dim = rows.shape
    check_dim(storage, name, dim)
    if side is None:
        return
    if (batch, heads, dim) != side.bound:
        raise ValueError(f"{name} {rows.shape} have (B, H, D) = {(batch, heads, dim)}, the buffers have {side.bound}")
    if rows.dtype != side.dtype:
        raise ValueError(f"{name} are {rows.dtype}, the buffers hold {side.dtype}")
