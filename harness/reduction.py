"""Makes a failing program smaller, as a value, outside Hypothesis.

Hypothesis shrinks the choices that led to a program; some steps that a reader would take at once (say a trim in one
word, merge two forwards, forget the other sequence) change several choices together, and it stays one or two
operations longer than needed.  This pass takes those steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from harness.execution import execute
from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.judging import Property
from harness.media import Media, MediaError, check_media
from harness.operations import (
    MAX_TOKENS,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Operation,
    Prefill,
    Program,
    TrimFront,
)
from harness.target import Target

ATTEMPTS = 400  # programs tried at most; a shrunk program rarely needs fifty


def reduce_finding(target: Target, finding: Finding, properties: tuple[Property, ...]) -> tuple[Finding, bool]:
    """The smallest program found that breaks the same property, and whether it does so in a target made new.

    A finding that does not come back depends on something outside the program (state that an earlier session left
    behind): a replay cannot judge it, and False says so.
    """
    prop = tuple(p for p in properties if p.id == finding.property_id)

    def fails(program: Program) -> Finding | None:
        try:
            judge_program(target, program, prop)
        except FindingError as error:
            return error.finding
        return None

    again = fails(finding.program)
    if again is None:
        return finding, False
    best: Finding = again
    attempts = 0
    progress = True
    while progress and attempts < ATTEMPTS:
        progress = False
        for drawn in _candidates(target, best.program):
            candidate = _normal(drawn)
            if _size(candidate) >= _size(best.program):
                continue
            attempts += 1
            smaller = fails(candidate)
            if smaller is not None:
                best, progress = smaller, True
                break
            if attempts >= ATTEMPTS:
                break
    target.renew()
    return best, fails(best.program) is not None


def _size(program: Program) -> tuple[int, int, int, int]:
    """Order of preference: fewer operations, fewer sequences, plainer operations, smaller numbers."""
    operations = program.operations
    rank = sum(0 if isinstance(op, (Prefill, Chunk, TrimFront)) else 1 for op in operations)
    numbers = sum(value for op in operations for value in dataclasses.asdict(op).values() if isinstance(value, int))
    for media in (each for op in operations if isinstance(op, Prefill) for each in op.media):
        rank += 1 + bool(media.frames)
        numbers += media.at + media.rows + media.columns + media.frames
    rank += sum(owner != "pool" for owner in program.owners)
    return len(operations), len(program.owners), rank, numbers


def _candidates(target: Target, program: Program) -> Iterator[Program]:
    """Programs that might do, the boldest first."""
    operations = program.operations
    for keep in range(len(program.owners)):
        if len(program.owners) > 1:
            alone = tuple(_replaced(op, "sequence", 0) for op in operations if op.index == keep)
            yield Program(alone, (program.owners[keep],))
    for index, owner in enumerate(program.owners):
        if owner != "pool":
            yield Program(operations, (*program.owners[:index], "pool", *program.owners[index + 1 :]))
    size = len(operations) // 2
    while len(operations) > 8 and size >= max(2, len(operations) // 8):  # a long one: whole stretches first
        for start in range(len(operations) - size, -1, -size):
            yield Program(operations[:start] + operations[start + size :], program.owners)
        size //= 2
    for number in range(len(operations) - 1, -1, -1):
        yield _with(program, number)
    for number, (left, right) in enumerate(pairwise(operations)):
        if isinstance(left, (Prefill, Chunk, Decode)) and left.index == right.index and not _removes(right):
            tokens = _tokens(left) + _tokens(right)
            if tokens > MAX_TOKENS:
                continue
            merged = Prefill(tokens, left.index, media=_media(left))  # a Chunk, where it is not the first (``_normal``)
            yield Program((*operations[:number], merged, *operations[number + 2 :]), program.owners)
    started: set[int] = set()
    for number, operation in enumerate(operations):
        if isinstance(operation, Decode) and operation.index not in started:
            yield _with(program, number, Prefill(operation.times, operation.index))
        if not _removes(operation):
            started.add(operation.index)
    steps = execute(target, program).steps
    for number, operation in enumerate(operations):
        if isinstance(operation, EnforceMaxKvSize) and number < len(steps) and steps[number].expected_removed:
            yield _with(program, number, TrimFront(steps[number].expected_removed or 0, sequence=operation.sequence))
        for field in dataclasses.fields(operation):
            value = getattr(operation, field.name)
            if type(value) is not int or field.name == "sequence":
                continue
            steps_down = [
                value - (value >> shift) for shift in range(1, value.bit_length() + 1)
            ]  # half, then ever less
            for smaller in dict.fromkeys((0, 1, 2, *steps_down)):
                if 0 < smaller < value or (smaller == 0 < value and field.name in ("keep", "n_discard")):
                    yield _with(program, number, _replaced(operation, field.name, smaller))
    for number, operation in enumerate(operations):
        for media in _smaller_media(_media(operation)):
            yield _with(program, number, dataclasses.replace(operation, media=media))  # type: ignore[call-arg]


def _media(operation: Operation) -> tuple[Media, ...]:
    return operation.media if isinstance(operation, Prefill) else ()


def _smaller_media(media: tuple[Media, ...]) -> Iterator[tuple[Media, ...]]:
    """Fewer images, then images instead of videos, then smaller and earlier ones."""
    for number in range(len(media)):
        yield media[:number] + media[number + 1 :]
    for number, each in enumerate(media):
        for name in ("frames", "rows", "columns", "at"):
            value = getattr(each, name)
            for smaller in dict.fromkeys((0, 1, 2, value // 2, value - 1)):
                if not 0 <= smaller < value or (smaller == 0 and name in ("rows", "columns")):
                    continue
                changes: dict[str, Any] = {name: smaller}
                candidate = (*media[:number], dataclasses.replace(each, **changes), *media[number + 1 :])
                try:
                    check_media(candidate, MAX_TOKENS)
                except MediaError:
                    continue
                yield candidate


def _normal(program: Program) -> Program:
    """The same forwards in the usual words: the first one of a sequence is a Prefill, a later one a Chunk."""
    started: set[int] = set()
    operations: list[Operation] = []
    for operation in program.operations:
        if isinstance(operation, (Prefill, Chunk)):
            if operation.index in started:
                operation = Chunk(operation.tokens, operation.sequence)
            else:
                operation = Prefill(operation.tokens, operation.sequence, media=_media(operation))
        if not _removes(operation):
            started.add(operation.index)
        operations.append(operation)
    return Program(tuple(operations), program.owners)


def _replaced(operation: Operation, name: str, value: int) -> Operation:
    changes: dict[str, Any] = {name: value}
    return dataclasses.replace(operation, **changes)


def _with(program: Program, number: int, *instead: Operation) -> Program:
    operations = program.operations
    return Program((*operations[:number], *instead, *operations[number + 1 :]), program.owners)


def _removes(operation: Operation) -> bool:
    return not isinstance(operation, (Prefill, Chunk, Decode))


def _tokens(operation: Operation) -> int:
    return operation.times if isinstance(operation, Decode) else int(getattr(operation, "tokens", 0))
