"""What one operation was: the ledger's side of it, and what the target did and said."""

from __future__ import annotations

from dataclasses import dataclass

from harness.ledger import Append, SequenceState
from harness.operations import BATCHES, Operation, Owner
from harness.target import (
    ArgumentsObservation,
    CopyObservation,
    ForwardObservation,
    PromptInput,
    RemovalObservation,
)
from harness.telling import Told


@dataclass(frozen=True)
class ForwardStep:
    """One forward of one sequence within a step (of a row, where a batch goes forward): what the ledger says was
    appended and what the target did. ``read``: how many of its tokens, the first ones, belong to the ``prompt`` with
    images that was given before. ``number``: how many tokens the sequence had ever processed. ``removed``: keys had
    been trimmed or rolled back from it."""

    append: Append
    seen: ForwardObservation
    prompt: PromptInput | None = None
    read: int = 0
    sequence: int = 0
    number: int = 0
    removed: bool = False

    @property
    def as_kv_heads(self) -> frozenset[bool]:
        """Of a forward of a batch, by layers: has it as many rows as there are KV heads, or not? Empty of a forward of
        one row, and where attention calls are not seen. Where both numbers agree, a mask that is broadcast along the
        wrong one of these axes raises nothing."""
        rows = self.append.rows
        return frozenset(rows == call.kv_heads for call in self.seen.attention) if rows > 1 else frozenset()


AS_KV_HEADS = {True: "with as many rows as KV heads", False: "with another number of rows than KV heads"}


@dataclass(frozen=True)
class Step:
    """One operation: the ledger's state on both sides, and the observations.

    ``numbers``: how many tokens each sequence had ever processed before. ``effective``: did an operation on the whole
    state, or on the batch, do anything, by the ledger? ``refuses``: a trim or rollback that the ledger says must be
    refused. ``replaced``: the sequence that now has another state in the
    place of its own. ``rows``: the sequences in the batch, once those have left that the operation takes out.
    """

    index: int
    operation: Operation
    before: SequenceState
    after: SequenceState
    owner: Owner
    forwards: tuple[ForwardStep, ...] = ()
    expected_removed: int | None = None  # None for an operation that removes nothing by nature
    removal: RemovalObservation | None = None
    told: tuple[Told, ...] = ()  # of every sequence, in order; () after an error
    bystanders: tuple[tuple[int, Told], ...] = ()  # after an error: those that the operation is not about
    numbers: tuple[int, ...] = ()
    effective: bool | None = None  # None for other operations
    replaced: int | None = None
    copied: CopyObservation | None = None
    rows: tuple[int, ...] = ()
    refuses: bool = False
    arguments: ArgumentsObservation | None = None  # None unless they are watched
    untold: str | None = None  # why a session that could not tell of its caches could not

    @property
    def acted(self) -> frozenset[int]:
        """The sequences that the operation is about, all others being bystanders."""
        if isinstance(self.operation, BATCHES):
            return frozenset(self.rows)
        return frozenset({self.operation.index if self.replaced is None else self.replaced})

    @property
    def parted(self) -> bool:
        """Did the target do what had to be refused, or refuse what nothing was in the way of? Then it holds other keys
        than the ledger, whatever follows."""
        seen = self.copied if self.removal is None else self.removal
        return seen is not None and seen.error is None and self.refuses != (seen.refused is not None)

    @property
    def error(self) -> str | None:
        if self.removal is not None and self.removal.error is not None:
            return self.removal.error
        if self.copied is not None and self.copied.error is not None:
            return self.copied.error
        return next((f.seen.error for f in self.forwards if f.seen.error is not None), self.untold)
