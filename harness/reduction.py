"""Makes a failing program smaller, as a value, outside Hypothesis.

Hypothesis shrinks the choices that led to a program; some steps that a reader would take at once (say a trim in one
word, merge two forwards, forget the other sequence) change several choices together, and it stays one or two
operations longer than needed.  This pass takes those steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from harness.batch_reduction import fewer, merged, without
from harness.batches import without_batches
from harness.capability import needs
from harness.execution import execute
from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.judging import Property
from harness.media import Media, MediaError, check_media
from harness.operations import (
    BATCHES,
    FORWARDS,
    MAX_TOKENS,
    Batch,
    BatchForward,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    OperationError,
    Owner,
    Prefill,
    Program,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
    Verify,
    begun_before,
    tokens_of,
)
from harness.target import Target

ATTEMPTS = 400  # programs tried at most; a shrunk program rarely needs fifty
STARTS = 2  # targets made new, where the first ends a program too early: an engine may hang once, or be killed


def reduce_finding(
    target: Target,
    finding: Finding,
    properties: tuple[Property, ...],
    most: int = ATTEMPTS,
    trying: Callable[[Program], None] = lambda _: None,
) -> tuple[Finding, bool]:
    """The smallest program found that breaks the same property, and whether it does so in a target made new.

    Where the smallest does not, the program that was found is asked in a target made new as well, and is what is told
    in either case: what a target has in it of earlier sessions makes programs fail that alone say nothing.  A finding
    that does not come back depends on something outside the program (such a state, the time, chance): a replay cannot
    judge it, and False says so.  Where the run that should have shown it ended in front of that, the message says how.
    ``most``: programs to try; 0 only asks that question.  ``trying`` is told of each in front of it, and may interrupt.
    """
    prop = tuple(p for p in properties if p.id == finding.property_id)
    ended: list[str] = []  # what kept the last run from getting there

    def fails(program: Program, step: int | None = None) -> Finding | None:
        ended.clear()
        try:
            run = judge_program(target, program, prop).run
        except FindingError as error:
            return error.finding
        last = run.steps[-1] if run.steps else None
        if last is not None and last.error is not None and (step is None or last.index <= step):
            ended.append(" ".join(last.error.split()))
        return None

    def fails_anew(shown: Finding) -> bool:
        for _ in range(STARTS):
            target.renew()
            if fails(shown.program, shown.violation.step) is not None:
                return True
            if not ended:  # it got there, and was right
                return False
        return False

    again = fails(finding.program)
    if again is None:
        if not fails_anew(finding):
            return _unshown(finding, ended), False
        again = finding
    best: Finding = again
    attempts = 0
    progress = True
    while progress and attempts < most:
        progress = False
        for operations, owners in _candidates(target, best.program):
            try:
                candidate = _normal(operations, owners)
            except OperationError:
                continue  # it means nothing: a Fork into a sequence that is gone, images that no longer come first
            if _size(candidate) >= _size(best.program) or not needs(candidate) <= target.capabilities:
                continue
            attempts += 1
            trying(candidate)
            smaller = fails(candidate)
            if smaller is not None:
                best, progress = smaller, True
                break
            if attempts >= most:
                break
    if fails_anew(best):
        return best, True
    if best.program != finding.program and fails_anew(again):
        return again, True
    return _unshown(finding, ended), False


def _unshown(finding: Finding, ended: Sequence[str]) -> Finding:
    """A finding that did not come back, with what the run that should have shown it ended in."""
    if not ended:
        return finding
    message = f"{finding.violation.message} (run again, it ended before that: {ended[0]:.200})"
    return dataclasses.replace(finding, violation=dataclasses.replace(finding.violation, message=message))


def _size(program: Program) -> tuple[int, int, int, int]:
    """Order of preference: fewer operations, fewer sequences, plainer operations, smaller numbers."""
    operations = program.operations
    rank = sum(0 if isinstance(op, (Prefill, Chunk, TrimFront)) else 1 for op in operations)
    numbers = sum(value for op in operations for value in dataclasses.asdict(op).values() if isinstance(value, int))
    numbers += sum(sum(op.tokens) + len(op.tokens) for op in operations if isinstance(op, BatchForward))
    numbers += sum(len(op.rows) + (op.rows != tuple(sorted(op.rows))) for op in operations if isinstance(op, Batch))
    for media in (each for op in operations if isinstance(op, Prefill) for each in op.media):
        rank += 1 + bool(media.frames)
        numbers += media.at + media.rows + media.columns + media.frames
    rank += sum(owner != "pool" for owner in program.owners)
    return len(operations), len(program.owners), rank, numbers


_Draft = tuple[tuple[Operation, ...], tuple[Owner, ...]]
"""What may become a Program, or may mean nothing."""


def _candidates(target: Target, program: Program) -> Iterator[_Draft]:
    """Programs that might do, the boldest first."""
    operations, owners = program.operations, program.owners
    batched = any(isinstance(op, BATCHES) for op in operations)
    if batched:
        operations = tuple(without_batches(operations, owners, Chunk))
        yield operations, owners
    for keep in range(len(owners)):
        if len(owners) > 1:
            yield _alone(op for op in operations if op.index == keep), (owners[keep],)
    for gone in range(len(owners)):
        if len(owners) > (1 if batched else 2):
            yield without(program.operations, gone), (*owners[:gone], *owners[gone + 1 :])
    for number, fork in enumerate(operations):
        if isinstance(fork, Fork):  # one sequence that goes the way of both
            mine = [op for op in operations[:number] if op.index == fork.index]
            mine += [op for op in operations[number + 1 :] if op.index == fork.into]
            yield _alone(mine), (owners[fork.into],)
    operations = program.operations
    for index, owner in enumerate(owners):
        if owner != "pool":
            yield operations, (*owners[:index], "pool", *owners[index + 1 :])
    size = len(operations) // 2
    while len(operations) > 8 and size >= max(2, len(operations) // 8):  # a long one: whole stretches first
        for start in range(len(operations) - size, -1, -size):
            yield operations[:start] + operations[start + size :], owners
        size //= 2
    for start, end in _detours(operations):
        yield operations[:start] + operations[end + 1 :], owners
        yield operations[:start] + operations[start + 1 : end] + operations[end + 1 :], owners
    for number in range(len(operations) - 1, -1, -1):
        yield _with(program, number)
    begun = begun_before(operations, owners)
    for number, (left, right) in enumerate(pairwise(operations)):
        if left.index != right.index or not isinstance(left, FORWARDS):
            continue
        rest = operations[number + 2 :]
        if isinstance(left, Chunk) and isinstance(right, Rollback) and begun[number] and 0 < right.n <= left.tokens:
            yield (*operations[:number], Verify(left.tokens, left.tokens - right.n, left.index), *rest), owners
        tokens = tokens_of(left) + tokens_of(right)
        if isinstance(right, FORWARDS) and tokens <= MAX_TOKENS:  # a Chunk, where it is not the first (``_normal``)
            yield (*operations[:number], Prefill(tokens, left.index, media=_media(left)), *rest), owners
    for number, (left, right) in enumerate(pairwise(operations)):
        for together in merged(left, right):
            yield (*operations[:number], together, *operations[number + 2 :]), owners
    for number, operation in enumerate(operations):
        if isinstance(operation, (Rollback, TrimFront)):
            yield from ((shorter, owners) for shorter in _never_there(operations, number))
        if isinstance(operation, Fork):
            yield from (_with(program, number, Prefill(tokens, operation.into)) for tokens in (1, 2))
        if isinstance(operation, Verify):
            for tokens in filter(None, (operation.accept, operation.drafts)):
                yield _with(program, number, Chunk(tokens, operation.index))
        if isinstance(operation, Decode) and not begun[number]:
            yield _with(program, number, Prefill(operation.times, operation.index))
    steps = execute(target, program).steps
    for number, operation in enumerate(operations):
        if isinstance(operation, EnforceMaxKvSize) and number < len(steps) and steps[number].expected_removed:
            yield _with(program, number, TrimFront(steps[number].expected_removed or 0, sequence=operation.sequence))
        yield from (_with(program, number, smaller) for smaller in _smaller_numbers(operation))
        yield from (_with(program, number, smaller) for smaller in fewer(operation))
    for number, operation in enumerate(operations):
        for media in _smaller_media(_media(operation)):
            yield _with(program, number, dataclasses.replace(operation, media=media))  # type: ignore[call-arg]
    used = {op.slot for op in operations if isinstance(op, (Snapshot, Restore))}
    for slot in used:
        for free in set(range(slot)) - used:
            renamed = (_replaced(op, "slot", free) if getattr(op, "slot", None) == slot else op for op in operations)
            yield tuple(renamed), owners


def _never_there(operations: tuple[Operation, ...], number: int) -> Iterator[tuple[Operation, ...]]:
    """With less to roll back or trim, nothing or one token, and as much less in the last forward before it."""
    removal = operations[number]
    assert isinstance(removal, (Rollback, TrimFront))
    for at in range(number - 1, -1, -1):
        forward = operations[at]
        if isinstance(forward, (Prefill, Chunk)) and forward.index == removal.index:
            for left in range(min(2, removal.n)):
                if forward.tokens > removal.n - left:
                    shorter = _replaced(forward, "tokens", forward.tokens - removal.n + left)
                    less = (_replaced(removal, "n", left),) if left else ()
                    yield (*operations[:at], shorter, *operations[at + 1 : number], *less, *operations[number + 1 :])
            return


def _alone(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """The same on the only sequence of a program; into which nothing can be forked."""
    return tuple(_replaced(op, "sequence", 0) for op in operations if not isinstance(op, Fork))


def _detours(operations: tuple[Operation, ...]) -> Iterator[tuple[int, int]]:
    """A Snapshot and a later Restore of its slot on the same sequence: what lies between came to nothing."""
    for start, left in enumerate(operations):
        for end in range(len(operations) - 1, start, -1):
            right = operations[end]
            if isinstance(left, Snapshot) and isinstance(right, Restore) and _same_place(left, right):
                yield start, end


def _same_place(left: Snapshot, right: Restore) -> bool:
    return (left.slot, left.sequence) == (right.slot, right.sequence)


_MAY_BE_ZERO = ("keep", "n_discard", "accept")
_NOT_SIZES = ("sequence", "slot", "into")


def _smaller_numbers(operation: Operation) -> Iterator[Operation]:
    """The same with one number less: by half, then by ever less."""
    for field in dataclasses.fields(operation):
        value = getattr(operation, field.name)
        if type(value) is not int or field.name in _NOT_SIZES:
            continue
        steps_down = [value - (value >> shift) for shift in range(1, value.bit_length() + 1)]
        for smaller in dict.fromkeys((0, 1, 2, *steps_down)):
            if 0 < smaller < value or (smaller == 0 < value and field.name in _MAY_BE_ZERO):
                if isinstance(operation, Verify) and field.name == "drafts":  # never fewer than are accepted
                    yield Verify(smaller, min(operation.accept, smaller), operation.sequence)
                else:
                    yield _replaced(operation, field.name, smaller)


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


def _normal(operations: tuple[Operation, ...], owners: tuple[Owner, ...]) -> Program:
    """The same forwards in the usual words: the first one of a sequence is a Prefill, a later one a Chunk."""
    usual: list[Operation] = []
    for operation, begun in zip(operations, begun_before(operations, owners), strict=True):
        if isinstance(operation, (Prefill, Chunk)):
            if begun:
                operation = Chunk(operation.tokens, operation.sequence)
            else:
                operation = Prefill(operation.tokens, operation.sequence, media=_media(operation))
        usual.append(operation)
    return Program(tuple(usual), owners)


def _replaced(operation: Operation, name: str, value: int) -> Operation:
    changes: dict[str, Any] = {name: value}
    return dataclasses.replace(operation, **changes)


def _with(program: Program, number: int, *instead: Operation) -> _Draft:
    operations = program.operations
    return (*operations[:number], *instead, *operations[number + 1 :]), program.owners
