"""Parts of a run as another run that must come to the same: without the tokens that it rolled back, or without all that
was trimmed. Works on the ledger's half of the run alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.ledger import PoolLedger
from harness.operations import (
    BATCHES,
    Batch,
    Chunk,
    Decode,
    Fork,
    Operation,
    Owner,
    Prefill,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.steps import ForwardStep, Step


@dataclass
class Line:
    """One operation of a retelling. ``step``: of the run; ``tokens``: how many of its tokens are told again, from its
    first on (None for an operation that has none), and ``forwards`` those of the run that had them; ``behind``: drafts
    were left out of the state that it works on."""

    step: Step
    operation: Operation
    tokens: int | None = None
    behind: bool = False
    forwards: tuple[ForwardStep, ...] = ()

    @property
    def numbered(self) -> tuple[Operation, tuple[int, ...], None]:
        """What ``execution.execute_numbered`` takes."""
        operation, numbers = self.operation, self.step.numbers
        if self.tokens is not None:
            if isinstance(operation, Decode):
                operation = replace(operation, times=self.tokens)
            elif isinstance(operation, (Prefill, Chunk)):
                operation = replace(operation, tokens=self.tokens)
            elif isinstance(operation, Verify):
                operation = Chunk(self.tokens, operation.sequence)
        if self.forwards:  # a row of a batch has a number of its own within the step
            first = self.forwards[0]
            numbers = (*numbers[: first.sequence], first.number, *numbers[first.sequence + 1 :])
        return operation, numbers, None


def _forward_lines(step: Step, behind: Sequence[bool]) -> list[Line]:
    """The forwards of a step, every row of a batch by itself."""
    if not step.forwards:
        return []
    if not isinstance(step.operation, BATCHES):
        count = sum(len(forward.append.positions) for forward in step.forwards)
        return [Line(step, step.operation, count, behind[step.operation.index], step.forwards)]
    lines = []
    for forward in step.forwards:
        count, sequence = len(forward.append.positions), forward.sequence
        lines.append(Line(step, Chunk(count, sequence), count, behind[sequence], (forward,)))
    return lines


class _Teller:
    """The state of ``without_rejected`` between two steps."""

    def __init__(self, owners: tuple[Owner, ...]) -> None:
        self.lines: list[Line] = []
        self._pool = PoolLedger(owners)
        self._recent: list[list[Line]] = [[] for _ in owners]  # of each sequence: forwards that may still lose tokens
        self._behind = [False] * len(owners)
        self._slots: dict[int, bool] = {}

    def take(self, step: Step) -> None:
        operation, removed = step.operation, step.expected_removed
        for line in _forward_lines(step, self._behind):
            self._pool.sequences[line.operation.index].append(line.tokens or 0)
            self.lines.append(line)
            self._recent[line.operation.index].append(line)
        if isinstance(operation, BATCHES):
            return
        if isinstance(operation, (Rollback, Verify)):
            if removed:
                self._roll_back(step, removed)
        elif removed is not None:
            if removed:  # refused, or not due: nothing to tell
                self._trim(step, removed)
        elif step.effective is not None:
            self._tell(step, operation)
            if self._pool.apply(operation) and not isinstance(operation, QuantizeCache):  # which makes no other state
                self._copy(operation)

    def _tell(self, step: Step, operation: Operation) -> None:
        self.lines.append(Line(step, operation, behind=self._behind[step.operation.index]))

    def _roll_back(self, step: Step, removed: int) -> None:
        index = step.operation.index
        ledger, recent = self._pool.sequences[index], self._recent[index]
        first = ledger.held[-removed]
        ledger.rollback(removed)
        whole = first == ledger.offset >= step.before.read
        if not whole or sum(line.tokens or 0 for line in recent) < removed:
            self._tell(step, Rollback(removed, index))
            recent.clear()
            return
        self._behind[index] = True
        while removed:
            last = recent[-1]
            gone = min(last.tokens or 0, removed)
            last.tokens = (last.tokens or 0) - gone
            removed -= gone
            if not last.tokens:
                recent.pop()

    def _trim(self, step: Step, removed: int) -> None:
        index = step.operation.index
        ledger = self._pool.sequences[index]
        before = list(ledger.held)
        ledger.remove(step.operation)
        keep = next((slot for slot, held in enumerate(ledger.held) if held != before[slot]), len(ledger.held))
        self._tell(step, TrimFront(removed, keep, index))

    def _copy(self, operation: Operation) -> None:
        index = operation.index
        self._recent[index].clear()
        if isinstance(operation, Snapshot):
            self._slots[operation.slot] = self._behind[index]
        elif isinstance(operation, Restore):
            self._behind[index] = self._slots[operation.slot]
        elif isinstance(operation, Reset):
            self._behind[index] = False
        elif isinstance(operation, Fork):
            self._recent[operation.into].clear()
            self._behind[operation.into] = self._behind[index]


def without_rejected(owners: tuple[Owner, ...], steps: Sequence[Step]) -> list[Line]:
    """The same run as if the tokens that it rolled back had never been processed; a line that loses all is left out.

    A rollback stays a rollback where its tokens cannot be left out: another state was made of them (a Snapshot, a
    Fork), they lie in a prompt that was read as a whole, or there is a gap among them, behind sinks. Trims are told as
    what they removed, because a bound would count the drafts as well. Ends in front of an error.
    """
    teller = _Teller(owners)
    for step in steps:
        if step.error is not None:
            break
        teller.take(step)
    return [line for line in teller.lines if line.tokens != 0]


def without_batches(steps: Sequence[Step]) -> list[Line]:
    """The same run with every sequence by itself. Ends in front of an error."""
    lines: list[Line] = []
    for step in steps:
        if step.error is not None:
            break
        if not isinstance(step.operation, BATCHES) and not step.forwards:
            lines.append(Line(step, step.operation))
        elif isinstance(step.operation, Verify):  # as it is: with the rollback
            lines.append(Line(step, step.operation, forwards=step.forwards))
        else:
            lines += _forward_lines(step, [False] * len(step.numbers))
    return lines


def untrimmed(steps: Sequence[Step]) -> list[int]:
    """Indices of the steps on sequences that never lost a key from the front, nor are a copy of one that had: run
    without the others, they mean the same."""
    kept: list[int] = []
    lost: set[int] = set()
    lost_slots: set[int] = set()
    stored: dict[int, str] = {}  # how the rows of a sequence are stored where its lost steps are left out
    for step in steps:
        operation, index = step.operation, step.operation.index
        if isinstance(operation, BATCHES):
            lost.update(row for row, told in enumerate(step.told) if told.state.forgotten and row in step.rows)
            if not lost.intersection(step.rows):
                kept.append(step.index)
            elif not isinstance(operation, Batch):  # it cannot be told without them, and the others miss its tokens
                lost.update(step.rows)
            continue
        if step.effective and isinstance(operation, Restore):
            _mark(lost, index, operation.slot in lost_slots)
        elif step.effective and isinstance(operation, Reset):
            if step.after.storage == stored.get(index, steps[0].before.storage):
                lost.discard(index)
        elif step.after.trimmed or step.after.forgotten or step.error is not None:
            lost.add(index)
        if step.effective and isinstance(operation, Snapshot):
            _mark(lost_slots, operation.slot, index in lost)
        elif step.effective and isinstance(operation, Fork):
            _mark(lost, operation.into, index in lost)
            if index not in lost:
                stored[operation.into] = step.after.storage
        if index not in lost:
            stored[index] = step.after.storage
            kept.append(step.index)
    return kept


def _mark(numbers: set[int], number: int, is_in: bool) -> None:
    (numbers.add if is_in else numbers.discard)(number)
