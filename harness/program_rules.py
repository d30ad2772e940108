"""What all rules of the state machine draw on: the program so far, and how an operation is added to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

from hypothesis.stateful import RuleBasedStateMachine, precondition

from harness import strategies as draw
from harness.capability import needed_by
from harness.judge import Judge
from harness.ledger import SequenceLedger
from harness.operations import BATCHES, Batch, Chunk, Operation, Prefill, QuantizeCache
from harness.quantised import takes_affine
from harness.rules import QuantisedStorage
from harness.target import Capability, Target

_Rule = TypeVar("_Rule", bound=Callable[..., None])


def able(*capabilities: Capability) -> Callable[[_Rule], _Rule]:
    """The rule is there for targets that can do this."""
    return precondition(lambda self: self.target.capabilities.issuperset(capabilities))


class ProgramRules(RuleBasedStateMachine):
    """Base of the classes that hold rules, and has none itself."""

    target: ClassVar[Target]
    judge: Judge | None = None

    def _apply(self, operation: Operation) -> None:
        if self.judge is not None and not self.judge.stopped:
            self.judge.apply(operation)

    def _apply_able(self, operations: Sequence[Operation]) -> None:
        """As far as the target can do them, and nothing of what ends in a batch of one."""
        if not self._several() and any(isinstance(operation, BATCHES) for operation in operations):
            return
        for operation in operations:
            if needed_by(operation) <= self.target.capabilities:
                self._apply(self._as_far_as_there(operation) if isinstance(operation, Batch) else operation)

    def _extend(self, index: int, tokens: int) -> None:
        """A chunk, or the prefill of a sequence that has nothing yet."""
        self._apply(Chunk(tokens, index) if self._ledger(index).offset else Prefill(tokens, index))

    def _sequence(self, drawn: int, deep: draw.Deep = ()) -> int:
        """Which one is meant, once it has been through ``deep``."""
        index = drawn % len(self.judge.run.owners) if self.judge is not None else 0
        if deep and self._ledger(index).offset:
            self._apply_able([dataclasses.replace(operation, sequence=index) for operation in deep])
        return index

    def _ledger(self, index: int) -> SequenceLedger:
        return self.judge.run.ledgers[index] if self.judge is not None else SequenceLedger()

    def _several(self) -> bool:
        """Are there two sequences that the pool owns?"""
        return self.judge is not None and self.judge.run.owners.count("pool") > 1

    def _neighbour(self, index: int) -> int:
        """The next sequence that the pool owns, round about; -1 if there is none."""
        owners = self.judge.run.owners if self.judge is not None else ()
        behind = [*range(index + 1, len(owners)), *range(index)]
        return next((other for other in behind if owners[other] == "pool"), -1)

    def _as_far_as_there(self, batch: Batch) -> Batch:
        """Each of its rows taken modulo the sequences of this program."""
        assert self.judge is not None
        several = len(self.judge.run.owners)
        return Batch(tuple(dict.fromkeys(row % several for row in batch.rows)))

    def _quantise(self, index: int, storages: draw.Storages, misfit: bool = False) -> None:
        """To what was drawn for rows of this width. ``misfit``: though it may have to be refused."""
        narrow, wide = storages
        storage: QuantisedStorage = wide if takes_affine(self.target) else narrow if misfit else "int8"
        if storage == "int8" and Capability.INT8 not in self.target.capabilities:
            storage = "affine8"
        self._apply_able((QuantizeCache(storage, index),))
