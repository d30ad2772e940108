"""The operation language: what can happen to a KV cache, as values.

A program is a tuple of frozen dataclasses.  It draws nothing, runs nothing and knows no model; it can be compared,
hashed, written as JSON and replayed.  Token ids are not part of an operation: the execution derives them (see
``harness.images.token_ids``), so that ``Prefill(10)`` says everything there is to say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, get_args

from harness.batches import BATCHES, Batch, BatchDecode, BatchForward, BatchOperation, rows_after, tokens_in_batch
from harness.copies import COPIES, Fork, QuantizeCache, Reset, Restore, SaveLoad, Snapshot
from harness.media import Media, MediaError, check_media, media_from_json
from harness.operation import (
    MAX_COUNT,
    MAX_OPERATIONS,
    MAX_SEQUENCES,
    MAX_SLOTS,
    MAX_TOKENS,
    MAX_TOTAL_TOKENS,
    Generation,
    Operation,
    OperationError,
    Owner,
    check_number,
)
from harness.trims import EnforceMaxKvSize, Rollback, TrimFront


@dataclass(frozen=True)
class Prefill(Operation):
    """The first forward of a sequence: ``tokens`` new tokens at once.

    ``media``: the images of the prompt, which is looked at once, here. The prompt reaches to the end of the last one;
    where ``tokens`` is less, the forwards that follow take the rest of it first (a chunked prefill that cuts an
    image). Only the first forward of a sequence can have any.
    """

    code: ClassVar[str] = "prefill"
    tokens: int
    sequence: int = 0
    media: tuple[Media, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        check_number(self, "tokens", self.tokens, 1, MAX_TOKENS)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)
        try:
            check_media(self.media, MAX_TOKENS)
        except MediaError as error:
            raise OperationError(f"Prefill: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Without the field ``media`` where there is none."""
        data = super().to_json()
        media = [each.to_json() for each in data.pop("media")]
        return data | ({"media": media} if media else {})

    def text(self) -> str:
        """``Prefill(12, image 2x2@3)``."""
        return f"Prefill({', '.join(map(str, (self.tokens, *self.media)))})"


@dataclass(frozen=True)
class Chunk(Operation):
    """A continuation chunk: ``tokens`` new tokens in one forward behind whatever the cache holds."""

    code: ClassVar[str] = "chunk"
    tokens: int
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "tokens", self.tokens, 1, MAX_TOKENS)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class Decode(Operation):
    """``times`` forwards of one token each (teacher-forced, so that targets can be compared)."""

    code: ClassVar[str] = "decode"
    times: int = 1
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "times", self.times, 1, MAX_TOKENS)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class Verify(Operation):
    """A verify round of speculative decoding: one forward of ``drafts`` tokens behind whatever the cache holds, of
    which all but the first ``accept`` are rolled back. Other tokens follow."""

    code: ClassVar[str] = "verify"
    drafts: int
    accept: int
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "drafts", self.drafts, 1, MAX_TOKENS)
        check_number(self, "accept", self.accept, 0, self.drafts)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


OPERATIONS: tuple[type[Operation], ...] = (
    Prefill,
    Chunk,
    Decode,
    TrimFront,
    EnforceMaxKvSize,
    Rollback,
    Verify,
    *COPIES,
    *BATCHES,
)
FORWARDS = (Prefill, Chunk, Decode, Verify)
_BY_CODE = {kind.code: kind for kind in OPERATIONS}


def tokens_of(operation: Operation) -> int:
    """How many tokens it processes."""
    if isinstance(operation, Decode):
        return operation.times
    if isinstance(operation, Verify):
        return operation.drafts
    return operation.tokens if isinstance(operation, (Prefill, Chunk)) else 0


def _read_by(operation: Operation) -> int:
    """Tokens that it makes a target look at: a prompt with images is read to the end of its last one."""
    media = operation.media if isinstance(operation, Prefill) else ()
    return max(tokens_of(operation), media[-1].end if media else 0)


def begun_before(operations: Sequence[Operation], owners: Sequence[Owner]) -> list[bool]:
    """Of every operation: had the state that its sequence is in ever had a forward?"""
    begun, slots, found = [False] * len(owners), dict[int, bool](), list[bool]()
    rows: tuple[int, ...] = ()
    for op in operations:
        found.append(begun[op.index])
        rows = rows_after(rows, op, owners)
        if isinstance(op, BATCHES):
            for row in rows if not isinstance(op, Batch) else ():
                begun[row] = True
        elif isinstance(op, FORWARDS):
            begun[op.index] = True
        elif owners[op.index] != "pool":
            continue  # out of the pool's reach: it copies and resets nothing
        elif isinstance(op, Reset):
            begun[op.index] = False
        elif isinstance(op, Snapshot):
            slots[op.slot] = begun[op.index]
        elif isinstance(op, Restore):
            begun[op.index] = slots.get(op.slot, begun[op.index])
        elif isinstance(op, Fork) and owners[op.into] == "pool":
            begun[op.into] = begun[op.index]
    return found


def operation_from_json(data: object) -> Operation:
    """Inverse of ``Operation.to_json``; raises OperationError for anything else."""
    if not isinstance(data, dict):
        raise OperationError(f"an operation must be an object, got {data!r:.60}")
    fields = dict(data)
    code = fields.pop("op", None)
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None:
        raise OperationError(f"unknown operation {code!r:.60}; known are {', '.join(sorted(_BY_CODE))}")
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(fields) - known):
        raise OperationError(f"operation {code!r} has no field {unknown[0]!r:.60}; it has {', '.join(sorted(known))}")
    try:
        if "media" in fields:
            fields["media"] = media_from_json(fields["media"])
        if issubclass(kind, BatchOperation):
            fields = kind.fields_from_json(fields)
        return kind(**fields)
    except MediaError as error:
        raise OperationError(f"{kind.__name__}: {error}") from error
    except TypeError as error:
        missing = sorted(known - set(fields))
        raise OperationError(f"operation {code!r} lacks a field (one of {', '.join(missing)})") from error


@dataclass(frozen=True)
class Program:
    """Operations on sequences of one pool; ``owners[i]`` says who owns the caches of sequence i."""

    operations: tuple[Operation, ...]
    owners: tuple[Owner, ...] = ("pool",)

    def __post_init__(self) -> None:
        if not 1 <= len(self.owners) <= MAX_SEQUENCES:
            raise OperationError(f"a program needs 1 to {MAX_SEQUENCES} sequences, got {len(self.owners)}")
        for owner in self.owners:
            if owner not in get_args(Owner):
                raise OperationError(f"a sequence is owned by 'pool' or 'model', got {owner!r:.60}")
        if len(self.operations) > MAX_OPERATIONS:
            raise OperationError(f"a program has at most {MAX_OPERATIONS} operations, got {len(self.operations)}")
        for operation in self.operations:
            if operation.index >= len(self.owners):
                raise OperationError(f"{operation.text()} names sequence {operation.index} of {len(self.owners)}")
            named = (operation.into,) if isinstance(operation, Fork) else getattr(operation, "rows", ())
            if beyond := [number for number in named if number >= len(self.owners)]:
                raise OperationError(f"{operation.text()} names sequence {beyond[0]} of {len(self.owners)}")
        total = sum(_read_by(op) + tokens_in_batch(op, len(self.owners)) for op in self.operations)
        if total > MAX_TOTAL_TOKENS:
            raise OperationError(f"a program processes at most {MAX_TOTAL_TOKENS} tokens, this one {total}")
        self._check_images()

    def _check_images(self) -> None:
        """A prompt with images comes first in its sequence, or first again behind a Reset, or behind a Restore or a
        Fork of a sequence that had not begun."""
        for op, begun in zip(self.operations, begun_before(self.operations, self.owners), strict=True):
            if isinstance(op, Prefill) and op.media and begun:
                raise OperationError(f"{op.text()} has images, but is not the first forward of its sequence")

    @property
    def has_media(self) -> bool:
        """Is there an image in it?"""
        return any(isinstance(op, Prefill) and bool(op.media) for op in self.operations)

    def __str__(self) -> str:
        several = len(self.owners) > 1
        parts = [
            f"s{op.index}:{op.text()}" if several and not isinstance(op, BATCHES) else op.text()
            for op in self.operations
        ]
        text = " ; ".join(parts) if parts else "(nothing)"
        if self.owners != ("pool",):
            text += "   [" + ", ".join(f"s{i} {owner}-owned" for i, owner in enumerate(self.owners)) + "]"
        return text

    def to_json(self) -> dict[str, Any]:
        return {"owners": list(self.owners), "operations": [op.to_json() for op in self.operations]}

    @classmethod
    def from_json(cls, data: object) -> Program:
        if not isinstance(data, dict) or set(data) != {"owners", "operations"}:
            raise OperationError("a program must be an object with exactly the fields 'owners' and 'operations'")
        owners, operations = data["owners"], data["operations"]
        if not isinstance(owners, list) or not isinstance(operations, list):
            raise OperationError("a program's 'owners' and 'operations' must be lists")
        if len(operations) > MAX_OPERATIONS:
            raise OperationError(f"a program has at most {MAX_OPERATIONS} operations, got {len(operations)}")
        return cls(tuple(operation_from_json(item) for item in operations), tuple(owners))


__all__ = [
    "BATCHES",
    "COPIES",
    "FORWARDS",
    "MAX_COUNT",
    "MAX_OPERATIONS",
    "MAX_SEQUENCES",
    "MAX_SLOTS",
    "MAX_TOKENS",
    "MAX_TOTAL_TOKENS",
    "OPERATIONS",
    "Batch",
    "BatchDecode",
    "BatchForward",
    "Chunk",
    "Decode",
    "EnforceMaxKvSize",
    "Fork",
    "Generation",
    "Operation",
    "OperationError",
    "Owner",
    "Prefill",
    "Program",
    "QuantizeCache",
    "Reset",
    "Restore",
    "Rollback",
    "SaveLoad",
    "Snapshot",
    "TrimFront",
    "Verify",
    "begun_before",
    "operation_from_json",
    "rows_after",
    "tokens_of",
]
