"""States that a program comes to, as its operations alone decide; a record of a known failure may ask for some."""

from __future__ import annotations

from collections.abc import Iterator

from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
    Verify,
)

RAGGED, TURNED = "ragged", "turned"
STATES = (RAGGED, TURNED)
"""``ragged``: a batch had rows of different lengths, or gave them different numbers of tokens, so that some were
padded; ``turned``: a sequence has had as many tokens as the narrowest window of its caches."""


def states_of(program: Program, window: int | None) -> frozenset[str]:
    """Those that the program comes to, if it gets to its end. ``window``: the narrowest of its caches, in tokens; None
    where none has one."""
    walk = _Walk(len(program.owners))
    told = {state for operation in program.operations for state in walk.apply(operation)}
    if window is not None and walk.most >= window:
        told.add(TURNED)
    return frozenset(told)


class _Walk:
    """How many tokens every sequence has had, and which of them are rows of the batch."""

    def __init__(self, sequences: int) -> None:
        self.lengths = [0] * sequences
        self.most = 0
        self._rows: tuple[int, ...] = ()
        self._cut = False  # fronts were trimmed: rows of as many tokens may hold other numbers of keys
        self._kept: dict[int, int] = {}

    def apply(self, operation: Operation) -> Iterator[str]:
        """States that show in this operation."""
        index = operation.index
        if isinstance(operation, Batch):
            self._rows = operation.rows
        elif isinstance(operation, BatchForward):
            tokens = operation.of(len(self._rows))
            for row, count in zip(self._rows, tokens, strict=True):
                self._add(row, count)
            if len(set(tokens)) > 1:
                yield RAGGED
        elif isinstance(operation, BatchDecode):
            for row in self._rows:
                self._add(row, operation.times)
        elif isinstance(operation, Verify):
            self._add(index, operation.drafts)
            self.lengths[index] -= operation.drafts - operation.accept
        elif isinstance(operation, (Prefill, Chunk)):
            self._add(index, operation.tokens)
        elif isinstance(operation, Decode):
            self._add(index, operation.times)
        elif isinstance(operation, Rollback):
            self.lengths[index] = max(0, self.lengths[index] - operation.n)
        elif isinstance(operation, (TrimFront, EnforceMaxKvSize)):
            self._cut = True
        elif isinstance(operation, Snapshot):
            self._kept[operation.slot] = self.lengths[index]
        elif isinstance(operation, Restore):
            self.lengths[index] = self._kept.get(operation.slot, self.lengths[index])
        elif isinstance(operation, Fork):
            self.lengths[operation.into] = self.lengths[index]
        elif isinstance(operation, Reset):
            self.lengths[index] = 0
        lengths = {self.lengths[row] for row in self._rows if row < len(self.lengths)}
        if len(lengths) > 1 or (self._cut and len(self._rows) > 1):
            yield RAGGED

    def _add(self, index: int, tokens: int) -> None:
        if index < len(self.lengths):
            self.lengths[index] += tokens
            self.most = max(self.most, self.lengths[index])
