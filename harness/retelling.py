"""Parts of a run as another run that must come to the same: without the tokens that it rolled back, or without all that
was trimmed. Works on the ledger's half of the run alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.execution import Step
from harness.ledger import PoolLedger
from harness.operations import (
    Chunk,
    Decode,
    Fork,
    Operation,
    Owner,
    Prefill,
    Reset,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
    Verify,
)


@dataclass
class Line:
    """One operation of a retelling. ``step``: of the run; ``tokens``: how many of its tokens are told again, from its
    first on (None for an operation that has none); ``behind``: drafts were left out of the state that it works on."""

    step: Step
    operation: Operation
    tokens: int | None = None
    behind: bool = False

    @property
    def numbered(self) -> tuple[Operation, int]:
        """What ``execution.execute_numbered`` takes."""
        operation = self.operation
        if self.tokens is not None:
            if isinstance(operation, Decode):
                operation = replace(operation, times=self.tokens)
            elif isinstance(operation, (Prefill, Chunk)):
                operation = replace(operation, tokens=self.tokens)
            elif isinstance(operation, Verify):
                operation = Chunk(self.tokens, operation.sequence)
        return operation, self.step.number


class _Teller:
    """The state of ``without_rejected`` between two steps."""

    def __init__(self, owners: tuple[Owner, ...]) -> None:
        self.lines: list[Line] = []
        self._pool = PoolLedger(owners)
        self._recent: list[list[Line]] = [[] for _ in owners]  # of each sequence: forwards that may still lose tokens
        self._behind = [False] * len(owners)
        self._slots: dict[int, bool] = {}

    def take(self, step: Step) -> None:
        operation, index, removed = step.operation, step.operation.index, step.expected_removed
        if count := sum(len(forward.append.positions) for forward in step.forwards):
            self._pool.sequences[index].append(count)
            line = self._tell(step, operation, count)
            self._recent[index].append(line)
        if isinstance(operation, (Rollback, Verify)):
            if removed:
                self._roll_back(step, removed)
        elif removed is not None:
            self._trim(step, removed)
        elif step.effective is not None:
            self._tell(step, operation)
            if self._pool.apply(operation):
                self._copy(operation)

    def _tell(self, step: Step, operation: Operation, tokens: int | None = None) -> Line:
        self.lines.append(Line(step, operation, tokens, self._behind[step.operation.index]))
        return self.lines[-1]

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


def untrimmed(steps: Sequence[Step]) -> list[int]:
    """Indices of the steps on sequences that never lost a key from the front, nor are a copy of one that had: run
    without the others, they mean the same."""
    kept: list[int] = []
    lost: set[int] = set()
    lost_slots: set[int] = set()
    for step in steps:
        operation, index = step.operation, step.operation.index
        if step.effective and isinstance(operation, Restore):
            _mark(lost, index, operation.slot in lost_slots)
        elif step.effective and isinstance(operation, Reset):
            lost.discard(index)
        elif step.after.trimmed or step.error is not None:
            lost.add(index)
        if step.effective and isinstance(operation, Snapshot):
            _mark(lost_slots, operation.slot, index in lost)
        elif step.effective and isinstance(operation, Fork):
            _mark(lost, operation.into, index in lost)
        if index not in lost:
            kept.append(step.index)
    return kept


def _mark(numbers: set[int], number: int, is_in: bool) -> None:
    (numbers.add if is_in else numbers.discard)(number)
