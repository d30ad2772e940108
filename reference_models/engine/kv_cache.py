"""A KV cache whose front can be trimmed while its offset stays absolute."""

from copy import deepcopy
from typing import Any, ClassVar

import mlx.core as mx

from .errors import CannotQuantise
from .runs import as_array, in_slots, joined
from .side import GROWTH, Side, check_pair
from .side import Storage as Storage
from .storage import check_dim, check_storage, layout
from .visibility import EVERYTHING, VisibilityRule


class KVCache:
    """Keys and values of one sequence (or one batch of sequences in step), for one layer.

    Slots are the places of the buffers, positions are absolute. Before any trim that keeps sinks, slot
    ``i`` holds position ``live_start + i``; after one it does not. Kept keys are never rotated again.
    ``positions`` says which position stands in which slot.

    Attributes:
        offset: absolute position of the next token to be written, in tokens; what RoPE reads.
        live_start: absolute position of the first retained key, in tokens (with sinks: the number of
            tokens that front trims removed).
        storage: "rows" keeps rows as given, "int8" keeps int8 rows and one fp16 scale per row, "affine8" and "affine4"
            what ``mx.quantize`` makes of them.
    """

    GROWTH: ClassVar[int] = GROWTH
    """Quantum of the allocation, in slots."""
    _limit: int | None = None  # see Side

    def __init__(self, storage: Storage = "rows") -> None:
        """Make an empty cache without buffers. Raises ValueError for an unknown ``storage``."""
        check_storage(storage)
        self.storage: Storage = storage
        self.offset: int = 0
        self.live_start: int = 0
        self._held: list[range] = []
        self._keys: Side | None = None
        self._values: Side | None = None

    @property
    def live_len(self) -> int:
        """Number of keys held, in tokens. Of every kind of cache: of the keys held that the next token will see,
        without its own; an append of l tokens returns ``live_len + l`` keys."""
        return self.offset - self.live_start

    @property
    def held_len(self) -> int:
        """Number of slots in use: ``live_len`` here; a cache with a rule of its own may hold more than is seen."""
        return sum(map(len, self._held))

    @property
    def runs(self) -> tuple[range, ...]:
        """The positions held, in slot order, as runs of consecutive ones."""
        return tuple(self._held)

    @property
    def rule(self) -> VisibilityRule:
        """What a query sees of the keys that ``update_and_fetch`` returns: here everything up to itself."""
        return EVERYTHING

    @property
    def positions(self) -> mx.array:
        """Absolute positions of the keys held, in slot order: int32 ``[held_len]``, here strictly ascending."""
        return as_array(self._held)

    def key_positions(self, l: int) -> mx.array:
        """Positions of all keys, in the order in which ``update_and_fetch`` of l tokens would return them now: int32
        ``[live_len + l]``. Nothing changes."""
        return as_array([*self._held, range(self.offset, self.offset + l)])

    @property
    def seq_len(self) -> int:
        """Alias of ``live_len``."""
        return self.live_len

    @property
    def capacity(self) -> int:
        """Allocated slots; 0 when there are no buffers."""
        return 0 if self._keys is None else self._keys.capacity

    @property
    def nbytes(self) -> int:
        """Bytes held in the buffers of keys and values, including scales."""
        return sum(side.nbytes for side in (self._keys, self._values) if side is not None)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of the buffers; 0 when there are none."""
        return self.nbytes // self.capacity if self.capacity else 0

    def copy(self) -> "KVCache":
        """An independent cache in the same state: nothing that is done to one shows in the other."""
        return deepcopy(self)

    def reset(self) -> None:
        """Back to a fresh cache: offset 0, no buffers."""
        self.offset = self.live_start = 0
        self._held = []
        self._keys = self._values = None

    def to_storage(self, storage: Storage) -> "KVCache":
        """A cache in the same state that stores what is held, and whatever follows, quantised; this one stays as it is.

        Raises CannotQuantise unless this cache has the storage "rows" and the other is none, and for rows that cannot
        be stored so; ValueError for an unknown storage.
        """
        self._check_to_storage(storage)
        for name, side in (("keys", self._keys), ("values", self._values)):
            if side is not None:
                check_dim(storage, name, side.bound[2])
        twin = self.copy()
        twin.storage = storage
        twin._keys, twin._values = (
            None if side is None else side.to_storage(storage) for side in (self._keys, self._values)
        )
        return twin

    def _check_to_storage(self, storage: Storage) -> None:
        check_storage(storage)
        if self.storage != "rows" or storage == "rows":
            raise CannotQuantise(
                f"cannot turn {self.storage} into {storage}: rows can be quantised, once, and never back"
            )

    def state(self) -> tuple[dict[str, mx.array], dict[str, Any]]:
        """All that makes this cache, to be written somewhere.

        Returns:
            ``(arrays, metadata)``: the slots in use as they are stored (rows, or quantised ones and scales), none
            without any; and ``storage``, ``offset``, ``live_start``, ``held`` (``[start, stop]`` of every run of
            positions) and ``dtypes`` of keys and values (of the rows given, which int8 storage does not show); of other
            kinds than this one also ``kind`` and what makes it.
        """
        arrays: dict[str, mx.array] = {}
        dtypes: list[str] = []
        for name, (stored, dtype) in zip(("keys", "values"), self._stored(), strict=False):
            arrays |= {f"{name}.{number}": array for number, array in enumerate(stored)}
            dtypes.append(str(dtype).removeprefix("mlx.core."))
        held = [[run.start, run.stop] for run in self._held]
        lengths = {"offset": self.offset, "live_start": self.live_start}
        return arrays, {"storage": self.storage, **lengths, "held": held, "dtypes": dtypes, **self._made_by()}

    @classmethod
    def from_state(cls, arrays: dict[str, mx.array], metadata: dict[str, Any]) -> "KVCache":
        """Inverse of ``state``; capacity is the least that holds the slots in use.

        Raises ValueError where arrays and metadata do not belong together.
        """
        cache = cls._fresh(metadata)
        cache.offset, cache.live_start = metadata["offset"], metadata["live_start"]
        cache._held = [range(start, stop) for start, stop in metadata["held"]]
        slots = {array.shape[2] for array in arrays.values()} or {0}
        cache._check_slots(slots)
        if arrays:
            count = len(layout(cache.storage, 0, mx.float32))
            cache._restore(
                [
                    ([arrays[f"{name}.{number}"] for number in range(count)], getattr(mx, dtype))
                    for name, dtype in zip(("keys", "values"), metadata["dtypes"], strict=True)
                ]
            )
        return cache

    def _stored(self) -> list[tuple[list[mx.array], mx.Dtype]]:
        """Of keys and values: the slots in use as they are stored, and the dtype of the rows; empty without any."""
        sides = (self._keys, self._values) if self.held_len else ()
        return [(side.live(self.held_len), side.dtype) for side in sides if side is not None]

    def _restore(self, stored: list[tuple[list[mx.array], mx.Dtype]]) -> None:
        """Inverse of ``_stored``, in a cache that already knows its positions."""
        self._keys, self._values = (Side.of(self.storage, dtype, live, self._limit) for live, dtype in stored)

    def _made_by(self) -> dict[str, Any]:
        """What ``_fresh`` needs to know beside the storage."""
        return {}

    @classmethod
    def _fresh(cls, metadata: dict[str, Any]) -> "KVCache":
        """An empty cache of the kind that ``state`` described."""
        return cls(metadata["storage"])

    def _check_slots(self, slots: set[int]) -> None:
        """Raise ValueError unless arrays of so many slots are those of the positions read."""
        if slots != {self.live_len} or self.held_len != self.live_len:
            raise ValueError(f"arrays of {sorted(slots)} slots for a live length of {self.live_len}")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append n tokens at slots ``[live_len, live_len + n)`` and return all that is held.

        Args:
            keys: ``[B, Hk, n, Dk]``, float16, bfloat16 or float32.
            values: ``[B, Hv, n, Dv]``, likewise.

        Returns:
            ``(keys, values)``, ``[B, Hk, live_len, Dk]`` and ``[B, Hv, live_len, Dv]`` after the append,
            in slot order and in the dtype of the input.

        Raises:
            ValueError: n is 0 or another axis is empty; keys and values disagree in B or n; B, H, D or the
                dtype differ from those of existing buffers; D is no multiple of the group size of an affine storage.
                The cache is unchanged then.
        """
        key_side, value_side = self._sides_for(keys, values)
        at, first = self.held_len, self.offset
        self.offset += keys.shape[2]
        self._held = joined([*self._held, range(first, self.offset)])
        return key_side.append(at, keys), value_side.append(at, values)

    def _sides_for(self, keys: mx.array, values: mx.array) -> tuple[Side, Side]:
        """The buffers that take these rows; ValueError, and nothing changed, where they cannot."""
        there = None if self._keys is None or self._values is None else (self._keys, self._values)
        check_pair(keys, values, self.storage, there)
        sides = there or (Side(self.storage, keys, self._limit), Side(self.storage, values, self._limit))
        self._keys, self._values = sides
        return sides

    def rows(self) -> tuple[mx.array, mx.array] | tuple[None, None]:
        """All that is held, in the order of ``positions``, without appending; (None, None) without buffers."""
        if self._keys is None or self._values is None:
            return None, None
        return self._keys.held(self.held_len), self._values.held(self.held_len)

    def trim_front(self, n: int, keep: int = 0) -> int:
        """Drop the n oldest tokens behind the first ``keep`` slots, and compact the buffers.

        ``live_start`` grows by what was removed, ``offset`` stays. Capacity falls to ``live_len`` rounded
        up to ``GROWTH``. When everything goes, the buffers are dropped and ``live_start == offset``; such
        a cache is not fresh, its next token has the position ``offset``, and it accepts any B, H, D.

        Args:
            n: tokens to drop, clamped to ``[0, live_len]``; 0 changes nothing.
            keep: sinks, in slots, clamped to ``[0, live_len - n]`` (n already clamped).

        Returns:
            The number of tokens removed.

        Raises:
            ValueError: n or keep is negative.
        """
        self.check_trim_front(n, keep)
        live = self.live_len
        n = min(n, live)
        if n == 0:
            return 0
        keep = min(keep, live - n)
        self.live_start += n
        self._held = in_slots(self._held, 0, keep) + in_slots(self._held, keep + n, live)
        self._drop(keep, keep + n, live)
        return n

    def _drop(self, first: int, last: int, live: int) -> None:
        """Keep slots ``[0, first) ++ [last, live)``; where that is nothing, no buffers either."""
        if last - first == live:
            self._keys = self._values = None
        for side in (self._keys, self._values):
            if side is not None:
                side.drop_slots(first, last, live)

    def rollback(self, n: int) -> int:
        """Drop the n newest tokens: ``offset`` falls, ``live_start`` stays.

        A logical rewind: the buffers stay allocated, also when no live token is left, and the next append
        overwrites the dropped slots. So B, H, D and the dtype remain bound until ``trim_front`` drops the
        buffers, which needs at least one live token.

        Args:
            n: tokens to drop, clamped to ``[0, live_len]``.

        Returns:
            The number of tokens removed.

        Raises:
            ValueError: n is negative.
        """
        self.check_rollback(n)
        n = min(n, self.live_len)
        self._held = in_slots(self._held, 0, self.live_len - n)
        self.offset -= n
        return n

    def check_trim_front(self, n: int, keep: int = 0) -> None:
        """Raise what ``trim_front`` would raise, and change nothing: for those who trim several caches or none."""
        if n < 0:
            raise ValueError(f"cannot trim {n} tokens from the front: n must be >= 0")
        if keep < 0:
            raise ValueError(f"cannot keep {keep} sinks: keep must be >= 0")

    def check_rollback(self, n: int) -> None:
        """Raise what ``rollback`` would raise, and change nothing."""
        if n < 0:
            raise ValueError(f"cannot roll back {n} tokens: n must be >= 0")
