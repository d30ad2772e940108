"""Sequences of a fake target, and what it does with their whole state: copies, files, resets, and their memory."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np

from harness.operations import Owner
from harness.target import ArgumentChange, ArgumentsObservation, CacheMemory, CopyObservation


class FakeRows:
    """One sequence: the rows held, oldest first, as (position, token)."""

    def __init__(self, owner: Owner) -> None:
        self.owner = owner
        self.rows: list[tuple[int, int]] = []
        self.offset = 0
        self.trimmed = self.rolled_back = False
        self.front = 0  # rows that front trims took
        self.largest = 0  # rows that its memory was made for
        self.slot = 8
        self.storage = "rows"

    def copied(self, owner: Owner, rows: list[tuple[int, int]] | None = None) -> FakeRows:
        """The same under another owner; ``rows``: with these, which may be shared."""
        twin = copy(self)
        twin.owner, twin.rows = owner, list(self.rows) if rows is None else rows
        return twin


class FakeCopies:
    """What a FakeSession inherits."""

    _target: Any
    _sequences: list[FakeRows]
    _slots: dict[int, FakeRows]
    _forwards: int
    _kept: list[FakeRows]
    _known: tuple[int, int] = (0, 0)  # forwards and rows trimmed when arguments were told last

    def watch_arguments(self) -> None:
        self._known = (0, 0)

    def arguments(self) -> ArgumentsObservation:
        """Every forward is given tokens, and its cache gives out keys and values."""
        bugs, (before, trims) = self._target.bugs, self._known
        new = self._forwards - before
        trimmed = sum(cache.front for cache in self._sequences)
        self._known = self._forwards, trimmed
        changed = []
        if "writes into its tokens" in bugs and new:
            changed.append(ArgumentChange("the tokens", None, (0, 1), "4", "0"))
        if "arguments grow" in bugs and new:
            changed.append(ArgumentChange("the offset", None, (), "of shape [1]", "of shape [2]"))
        if "a trim writes into keys given out" in bugs and trimmed > trims:
            changed.append(ArgumentChange("the keys that the cache gave out", 1, (0, 0, 2, 0), "1", "0"))
        if "gives nothing to watch" in self._target.quirks:
            return ArgumentsObservation()
        return ArgumentsObservation(3 * new, 3 if before else 0, tuple(changed))

    def memory(self, sequence: int) -> tuple[CacheMemory, ...]:
        """In steps of 256 rows, as large as it ever was since the last trim; none of its own in a batch."""
        if sequence in self._batch:
            return ()
        cache = self._sequences[sequence]
        held = self._bytes(cache)
        return (CacheMemory(held, cache.slot if held else 0),) * len(self._target.attention_layers)

    def footprint(self) -> int:
        """Of all sequences, in a batch or not, of all snapshots, and of what a bug keeps beside them."""
        held = [*self._sequences, *self._slots.values(), *self._kept]
        return sum(self._bytes(cache) for cache in held) * len(self._target.attention_layers)

    def _bytes(self, cache: FakeRows) -> int:
        held = -(-cache.largest // 256) * 256
        return max(held, 4096 if held and "allocates far ahead" in self._target.bugs else 0) * cache.slot

    def _copy(self, *sequences: int) -> CopyObservation | None:
        """Why nothing is to be copied; None if the pool owns all of them."""
        bugs = self._target.bugs
        if "copies raise" in bugs:
            return CopyObservation(error="RuntimeError: told\n to fail")
        if (
            any(self._sequences[each].owner == "model" for each in sequences)
            and "copies what the model owns" not in bugs
        ):
            return CopyObservation()
        return None

    @property
    def _copied(self) -> CopyObservation:
        return CopyObservation(len(self._target.attention_layers))

    def snapshot(self, sequence: int, slot: int) -> CopyObservation:
        if refused := self._copy(sequence):
            return refused
        cache = self._sequences[sequence]
        if "overwritten snapshots stay" in self._target.bugs and slot in self._slots:
            self._kept.append(self._slots[slot])
        self._slots[slot] = cache.copied(
            "pool", cache.rows if "snapshot shares its rows" in self._target.bugs else None
        )
        return self._copied

    def restore(self, sequence: int, slot: int) -> CopyObservation:
        if refused := self._copy(sequence):
            return refused
        if slot not in self._slots:
            return CopyObservation()
        old, cache = self._sequences[sequence], self._slots[slot].copied("pool")
        cache.offset = old.offset if "restore keeps the offset" in self._target.bugs else cache.offset
        self._sequences[sequence] = cache
        return self._copied

    def fork(self, sequence: int, into: int) -> CopyObservation:
        if refused := self._copy(sequence, into):
            return refused
        cache, bugs = self._sequences[sequence], self._target.bugs
        rows = cache.rows if "fork shares its rows" in bugs else list(cache.rows)
        if "fork leaves out a row" in bugs and rows:
            rows[0] = (0, 0)
        self._sequences[into] = cache.copied("pool", rows)
        return self._copied

    def save_and_load(self, sequence: int) -> CopyObservation:
        if refused := self._copy(sequence):
            return refused
        cache = self._sequences[sequence].copied("pool")
        if "forgets live_start in a file" in self._target.bugs:
            cache.offset = len(cache.rows)
        if "slots grow in a file" in self._target.bugs:
            cache.slot *= 2
        self._sequences[sequence] = cache
        return self._copied

    def reset(self, sequence: int) -> CopyObservation:
        if refused := self._copy(sequence):
            return refused
        old, fresh = self._sequences[sequence], FakeRows("pool")
        self._kept += [old] if "what is reset stays" in self._target.bugs else []
        fresh.offset = old.offset if "reset keeps the offset" in self._target.bugs else 0
        fresh.storage = old.storage
        fresh.largest = old.largest if "reset keeps its memory" in self._target.bugs else 0
        self._sequences[sequence] = fresh
        return self._copied

    def quantise(self, sequence: int, storage: str) -> CopyObservation:
        """Two numbers to a row fit int8 alone."""
        if refused := self._copy(sequence):
            return refused
        cache, bugs = self._sequences[sequence], self._target.bugs
        fits = storage == "int8" or "quantises what does not fit" in bugs
        if cache.storage != "rows" or not fits or "refuses to quantise" in bugs:
            del cache.rows[: "a refused quantisation trims" in bugs]
            return CopyObservation(refused="told to")
        cache.storage = storage
        cache.slot = 20 if "slots stay as large when quantised" in bugs else 8
        return self._copied

    def _stored(self, cache: FakeRows, numbers: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Rows [.., 2] as the cache gives them back."""
        if cache.storage == "rows":
            return numbers
        step = (np.abs(numbers).max(axis=-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
        step = np.where(step == 0, 1, step) * (2 if "quantises too coarsely" in self._target.bugs else 1)
        return np.asarray(np.clip(np.rint(numbers / step), -128, 127) * step)
