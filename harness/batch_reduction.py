"""What may be left out of a program with batches: candidates of ``harness.reduction``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from harness.operations import BATCHES, MAX_TOKENS, Batch, BatchDecode, BatchForward, Fork, Operation


def without(operations: Iterable[Operation], gone: int) -> tuple[Operation, ...]:
    """The same without one of several sequences; those behind it move up."""
    left: list[Operation] = []
    for op in operations:
        if isinstance(op, Batch):
            left.append(Batch(tuple(row - (row > gone) for row in op.rows if row != gone)))
        elif isinstance(op, BATCHES):
            left.append(op)
        elif op.index != gone and getattr(op, "into", None) != gone:
            moved: dict[str, Any] = {"sequence": op.index - (op.index > gone)}
            moved |= {"into": op.into - (op.into > gone)} if isinstance(op, Fork) else {}
            left.append(dataclasses.replace(op, **moved))
    return tuple(left)


def merged(left: Operation, right: Operation) -> Iterator[Operation]:
    """Two forwards of a batch, one behind the other, as one operation."""
    if isinstance(left, BatchDecode) and isinstance(right, BatchDecode):
        if left.times + right.times <= MAX_TOKENS:
            yield BatchDecode(left.times + right.times)
    elif isinstance(left, (BatchForward, BatchDecode)) and isinstance(right, (BatchForward, BatchDecode)):
        first, second = (op.tokens if isinstance(op, BatchForward) else (op.times,) for op in (left, right))
        rows = max(len(first), len(second))
        tokens = tuple(map(sum, zip(_spread(first, rows), _spread(second, rows), strict=True)))
        if set(first) | set(second) == {1}:
            yield BatchDecode(2)
        if max(tokens) <= MAX_TOKENS:
            yield BatchForward(tokens)


def _spread(tokens: tuple[int, ...], rows: int) -> tuple[int, ...]:
    return tokens + tokens[-1:] * (rows - len(tokens))


def fewer(operation: Operation) -> Iterator[Operation]:
    """The same with fewer rows, or fewer tokens for one of them."""
    if isinstance(operation, Batch):
        for number in range(len(operation.rows)):
            yield Batch(operation.rows[:number] + operation.rows[number + 1 :])
        if operation.rows != tuple(sorted(operation.rows)):
            yield Batch(tuple(sorted(operation.rows)))
    elif isinstance(operation, BatchForward):
        if set(operation.tokens) == {1}:
            yield BatchDecode(1)
        if len(operation.tokens) > 1:
            yield BatchForward(operation.tokens[:-1])
            yield BatchForward(operation.tokens[1:])
        for number, count in enumerate(operation.tokens):
            for smaller in dict.fromkeys((1, 2, count // 2, count - 1)):
                if 0 < smaller < count:
                    yield BatchForward((*operation.tokens[:number], smaller, *operation.tokens[number + 1 :]))
