"""The scheduler's pool of caches: who owns the caches of a sequence, and who may trim them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .cache_file import load_caches, save_caches
from .kv_cache import KVCache
from .storage import Storage, check_dim

Owner = Literal["pool", "model"]
"""Pool-owned caches can be trimmed by the scheduler, model-owned ones cannot."""


class UnknownSequence(KeyError):
    """A sequence id that was never opened, or is closed."""

    def __init__(self, seq: int, known: Sequence[int]) -> None:
        """Name the id and the open ones."""
        super().__init__(seq)
        self.seq = seq
        self.known = tuple(known)

    def __str__(self) -> str:
        """A sentence (KeyError would print the bare repr of the id)."""
        return f"sequence {self.seq!r} is not open (open: {list(self.known)})"


@dataclass(frozen=True)
class TrimReport:
    """What a front trim or a rollback did.

    Attributes:
        requested: tokens asked for, before clamping.
        removed: tokens removed, one entry per cache visited; () when no cache was visited.
    """

    requested: int
    removed: tuple[int, ...]

    @property
    def caches(self) -> int:
        """Number of caches visited."""
        return len(self.removed)


@dataclass(frozen=True)
class _Sequence:
    caches: tuple[KVCache, ...]
    owner: Owner


class CachePool:
    """Caches of all open sequences, one cache per attention layer and sequence; and snapshots in numbered slots.

    Every copy is a copy: MLX shares data until it is written to, so nothing is gained by sharing caches.
    """

    def __init__(self) -> None:
        """Make a pool without sequences."""
        self._open: dict[int, _Sequence] = {}
        self._next = 0
        self._slots: dict[int, tuple[KVCache, ...]] = {}

    @property
    def sequences(self) -> tuple[int, ...]:
        """Ids of the open sequences, ascending."""
        return tuple(self._open)

    def open(self, caches: Sequence[KVCache], owner: Owner = "pool") -> int:
        """Register the caches of a new sequence.

        Returns:
            The sequence id: 0, 1, 2, ...; ids are never used again.

        Raises:
            ValueError: no caches, an unknown owner, or a cache that is listed twice or belongs to another
                open sequence (a trim would hit it twice).
        """
        if owner not in get_args(Owner):
            raise ValueError(f"unknown owner {owner!r}: expected one of {get_args(Owner)}")
        if not caches:
            raise ValueError("a sequence needs at least one cache")
        taken = {id(cache): f"sequence {seq}" for seq, entry in self._open.items() for cache in entry.caches}
        for index, cache in enumerate(caches):
            if id(cache) in taken:
                raise ValueError(f"cache {index} is already in use by {taken[id(cache)]}")
            taken[id(cache)] = f"cache {index} of the same sequence"
        seq = self._next
        self._next += 1
        self._open[seq] = _Sequence(tuple(caches), owner)
        return seq

    def close(self, seq: int) -> None:
        """Forget a sequence; its caches are left as they are. Raises UnknownSequence."""
        self._entry(seq)
        del self._open[seq]

    def owner(self, seq: int) -> Owner:
        """Who owns the caches of the sequence. Raises UnknownSequence."""
        return self._entry(seq).owner

    def forward_caches(self, seq: int) -> tuple[KVCache, ...]:
        """Caches that the model reads and writes, for either owner. Raises UnknownSequence."""
        return self._entry(seq).caches

    def scheduler_slice(self, seq: int) -> tuple[KVCache, ...]:
        """Caches that the scheduler may trim: () for a model-owned sequence. Raises UnknownSequence."""
        entry = self._entry(seq)
        return entry.caches if entry.owner == "pool" else ()

    def bounds(self, seq: int) -> tuple[tuple[int, int, int], ...]:
        """offset, live_start and live_len of every cache that the scheduler may trim: () for a model-owned sequence.
        Raises UnknownSequence."""
        return tuple((cache.offset, cache.live_start, cache.live_len) for cache in self.scheduler_slice(seq))

    def live_len(self, seq: int) -> int:
        """Keys held by the first cache of the sequence, for either owner, in tokens."""
        return self._entry(seq).caches[0].live_len

    def offset(self, seq: int) -> int:
        """Offset of the first cache of the sequence, for either owner, in tokens."""
        return self._entry(seq).caches[0].offset

    def trim_front(self, seq: int, n: int, keep: int = 0) -> TrimReport:
        """Front-trim every cache of the scheduler's slice.

        For a model-owned sequence the slice is empty: the loop runs zero times, which is no error, and
        ``removed`` is ().

        Args:
            seq: an open sequence.
            n: tokens to drop, clamped as in ``KVCache.trim_front``.
            keep: sinks, in slots, clamped likewise.

        Raises:
            ValueError: n or keep is negative, for either owner.
            RuntimeError: the caches disagree in how many tokens they go back (``offset - live_start``); or one of them
                cannot (CannotTrim). None is changed then.
            UnknownSequence: seq is not open.
        """
        if keep < 0:
            raise ValueError(f"cannot keep {keep} sinks: keep must be >= 0")
        for cache in self.scheduler_slice(seq) if n > 0 else ():
            cache.check_trim_front(n, keep)
        return self._visit(seq, n, lambda cache: cache.trim_front(n, keep))

    def rollback(self, seq: int, n: int) -> TrimReport:
        """Roll back every cache of the scheduler's slice; arguments and errors as in ``trim_front``."""
        for cache in self.scheduler_slice(seq) if n > 0 else ():
            cache.check_rollback(n)
        return self._visit(seq, n, lambda cache: cache.rollback(n))

    def snapshot(self, seq: int, slot: int) -> int:
        """Keep a copy of the caches of a sequence in ``slot``, in the place of what is there.

        Returns:
            The number of caches copied; 0 for a model-owned sequence, which leaves the slot as it is.

        Raises:
            UnknownSequence: seq is not open.
        """
        if caches := self.scheduler_slice(seq):
            self._slots[slot] = _copies(caches)
        return len(caches)

    def restore(self, seq: int, slot: int) -> int:
        """Put copies of what ``slot`` holds in the place of the caches of ``seq``; the slot stays as it is.

        Returns:
            The number of caches replaced; 0 for an empty slot and for a model-owned sequence.

        Raises:
            UnknownSequence: seq is not open.
        """
        kept = self._slots.get(slot, ())
        return self._replace(seq, _copies(kept)) if self.scheduler_slice(seq) and kept else 0

    def fork(self, seq: int, into: int) -> int:
        """Put copies of the caches of ``seq`` in the place of those of ``into``.

        Returns:
            The number of caches replaced; 0 unless both are pool-owned.

        Raises:
            UnknownSequence: one of them is not open.
        """
        caches = self.scheduler_slice(seq)
        return self._replace(into, _copies(caches)) if caches and self.scheduler_slice(into) else 0

    def save_and_load(self, seq: int, path: Path) -> int:
        """Write the caches of a sequence to ``path`` (``.safetensors``) and go on with what is read from there.

        Returns:
            The number of caches; 0 for a model-owned sequence, of which nothing is written.

        Raises:
            UnknownSequence: seq is not open.
        """
        caches = self.scheduler_slice(seq)
        if not caches:
            return 0
        save_caches(path, caches)
        return self._replace(seq, tuple(load_caches(path)))

    def to_storage(self, seq: int, storage: Storage, widths: Sequence[tuple[int, int]] = ()) -> int:
        """Go on with quantised caches (see ``KVCache.to_storage``) in the place of those of ``seq``.

        Args:
            seq: an open sequence.
            storage: of the new caches.
            widths: numbers in a row of keys and of values, of each cache: one that holds nothing cannot know them, and
                would take a storage that its first rows do not fit.

        Returns:
            The number of caches; 0 for a model-owned sequence.

        Raises:
            CannotQuantise: one of the caches refuses; none is replaced then.
            UnknownSequence: seq is not open.
        """
        caches = self.scheduler_slice(seq)
        for keys, values in widths if caches else ():
            check_dim(storage, "keys", keys)
            check_dim(storage, "values", values)
        return self._replace(seq, tuple(cache.to_storage(storage) for cache in caches)) if caches else 0

    def reset(self, seq: int) -> int:
        """Empty every cache of the scheduler's slice; returns their number. Raises UnknownSequence."""
        caches = self.scheduler_slice(seq)
        for cache in caches:
            cache.reset()
        return len(caches)

    def _replace(self, seq: int, caches: tuple[KVCache, ...]) -> int:
        self._open[seq] = _Sequence(caches, self._entry(seq).owner)
        return len(caches)

    def _visit(self, seq: int, n: int, trim: Callable[[KVCache], int]) -> TrimReport:
        caches = self.scheduler_slice(seq)
        if n < 0:
            raise ValueError(f"cannot remove {n} tokens from sequence {seq}: n must be >= 0")
        # Not live_len: a layer with a rule of its own sees fewer keys than a dense one beside it.
        lengths = [cache.offset - cache.live_start for cache in caches]
        if len(set(lengths)) > 1:
            named = ", ".join(f"cache {index}: {length}" for index, length in enumerate(lengths))
            raise RuntimeError(f"caches of sequence {seq} disagree in offset - live_start ({named})")
        return TrimReport(n, tuple(trim(cache) for cache in caches))

    def _entry(self, seq: int) -> _Sequence:
        try:
            return self._open[seq]
        except KeyError:
            raise UnknownSequence(seq, self.sequences) from None


def _copies(caches: Sequence[KVCache]) -> tuple[KVCache, ...]:
    return tuple(cache.copy() for cache in caches)
