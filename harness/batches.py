"""Operations on a batch: several sequences that one cache per layer holds and one forward extends.

A pool has one batch, which is empty at first. Sequences in it can be trimmed, bounded and rolled back where they
are; any other operation on one of them takes it out first. All of this is the pool's: a model-owned sequence never
joins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from harness.operation import MAX_SEQUENCES, MAX_TOKENS, Operation, OperationError, Owner, check_number
from harness.trims import EnforceMaxKvSize, Rollback, TrimFront


class BatchOperation(Operation):
    """Base of those that act on the batch and not on a sequence."""

    @property
    def index(self) -> int:
        """The first sequence, which is as good as any."""
        return 0

    def to_json(self) -> dict[str, Any]:
        return {name: list(value) if isinstance(value, tuple) else value for name, value in super().to_json().items()}

    @classmethod
    def fields_from_json(cls, fields: dict[str, Any]) -> dict[str, Any]:
        """What ``to_json`` made of tuples, as tuples again."""
        return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


@dataclass(frozen=True)
class Batch(BatchOperation):
    """From now on the batch is made of the sequences ``rows``: those that are in it stay, in this order (a filter),
    the others join behind them (of different lengths: padded at the left), and who is not named leaves."""

    code: ClassVar[str] = "batch"
    rows: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_numbers(self, "rows", self.rows, 0, MAX_SEQUENCES - 1)
        if len(set(self.rows)) != len(self.rows):
            raise OperationError(f"Batch: rows {list(self.rows)} name a sequence twice")

    def text(self) -> str:
        return f"Batch({', '.join(map(str, self.rows))})"


@dataclass(frozen=True)
class BatchForward(BatchOperation):
    """One forward of all rows: ``tokens[i]`` new tokens for row i, as many as the last entry says for rows beyond it.
    Rows that get fewer than others are padded at the right. Without a row nothing happens."""

    code: ClassVar[str] = "batch_forward"
    tokens: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_numbers(self, "tokens", self.tokens, 1, MAX_TOKENS)
        if not self.tokens:
            raise OperationError("BatchForward: tokens must hold at least one number")

    def of(self, rows: int) -> tuple[int, ...]:
        """Tokens of each of so many rows."""
        return (*self.tokens, *(self.tokens[-1:] * rows))[:rows]

    def text(self) -> str:
        return f"BatchForward({', '.join(map(str, self.tokens))})"


@dataclass(frozen=True)
class BatchDecode(BatchOperation):
    """``times`` forwards of one token for every row."""

    code: ClassVar[str] = "batch_decode"
    times: int

    def __post_init__(self) -> None:
        check_number(self, "times", self.times, 1, MAX_TOKENS)


BATCHES = (Batch, BatchForward, BatchDecode)


def _check_numbers(owner: object, name: str, numbers: object, low: int, high: int) -> None:
    if not isinstance(numbers, tuple) or len(numbers) > MAX_SEQUENCES:
        raise OperationError(f"{type(owner).__name__}: {name} must be a list of at most {MAX_SEQUENCES} numbers")
    for number in numbers:
        check_number(owner, name, number, low, high)


def tokens_in_batch(operation: Operation, rows: int) -> int:
    """Tokens that it makes a batch of so many rows process."""
    if isinstance(operation, BatchForward):
        return sum(operation.of(rows))
    return operation.times * rows if isinstance(operation, BatchDecode) else 0


def rows_after(rows: tuple[int, ...], operation: Operation, owners: Sequence[Owner]) -> tuple[int, ...]:
    """The sequences in the batch, in order, when an operation has begun that met the batch ``rows``."""
    if isinstance(operation, Batch):
        wanted = [row for row in operation.rows if owners[row] == "pool"]
        return (*(row for row in wanted if row in rows), *(row for row in wanted if row not in rows))
    if isinstance(operation, (BatchForward, BatchDecode, TrimFront, EnforceMaxKvSize, Rollback)):
        return rows
    leaving = {operation.index, getattr(operation, "into", None)}
    return tuple(row for row in rows if row not in leaving)


def without_batches(operations: Sequence[Operation], owners: Sequence[Owner], forwards: Any) -> list[Operation]:
    """The same for every sequence by itself: ``forwards(tokens, sequence)`` makes the operation that extends one."""
    rows: tuple[int, ...] = ()
    alone: list[Operation] = []
    for operation in operations:
        rows = rows_after(rows, operation, owners)
        if isinstance(operation, BatchForward):
            alone += [forwards(count, row) for row, count in zip(rows, operation.of(len(rows)), strict=True)]
        elif isinstance(operation, BatchDecode):
            alone += [forwards(1, row) for _ in range(operation.times) for row in rows]
        elif not isinstance(operation, Batch):
            alone.append(operation)
    return alone
