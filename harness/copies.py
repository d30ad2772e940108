"""Operations on the whole state of a sequence: copies that are kept, put back, shared, written or quantised, and a new
start.

All of them are the pool's: on a model-owned sequence they do nothing, as a trim does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from harness.operation import MAX_SEQUENCES, MAX_SLOTS, Operation, OperationError, check_number
from harness.rules import QuantisedStorage


@dataclass(frozen=True)
class Snapshot(Operation):
    """Copy everything that the sequence holds into a slot of the pool; what was in the slot is gone."""

    code: ClassVar[str] = "snapshot"
    slot: int
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "slot", self.slot, 0, MAX_SLOTS - 1)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class Restore(Operation):
    """Put a copy of what a slot holds in the place of the sequence's state, whichever sequence it was taken from; the
    slot stays as it is. From an empty slot: nothing happens."""

    code: ClassVar[str] = "restore"
    slot: int
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "slot", self.slot, 0, MAX_SLOTS - 1)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class Fork(Operation):
    """Prefix sharing: the sequence ``into`` takes over the state of this one in the place of its own. From then on they
    share nothing that either can change. Nothing happens unless the pool owns both."""

    code: ClassVar[str] = "fork"
    into: int
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "into", self.into, 0, MAX_SEQUENCES - 1)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)
        if self.into == self.sequence:
            raise OperationError(f"Fork: into must be another sequence than {self.sequence}")

    def text(self) -> str:
        """``Fork(into=1)``: a bare number would read like a count."""
        return f"Fork(into={self.into})"


@dataclass(frozen=True)
class SaveLoad(Operation):
    """Write the caches of the sequence to a file, and go on with what is read from it."""

    code: ClassVar[str] = "save_load"
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class Reset(Operation):
    """Start again from nothing: offset 0, no buffers, no images. The next prefill may have images again."""

    code: ClassVar[str] = "reset"
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class QuantizeCache(Operation):
    """From now on the caches of the sequence store what they hold, and whatever follows, quantised. To be refused,
    with nothing changed, where they already do, and where rows of a cache do not fit the storage."""

    code: ClassVar[str] = "quantize_cache"
    storage: QuantisedStorage
    sequence: int = 0

    def __post_init__(self) -> None:
        if self.storage not in get_args(QuantisedStorage):
            known = ", ".join(get_args(QuantisedStorage))
            raise OperationError(f"QuantizeCache: storage must be one of {known}, got {self.storage!r:.60}")
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


COPIES: tuple[type[Operation], ...] = (Snapshot, Restore, Fork, SaveLoad, Reset, QuantizeCache)
