"""The state machine: its rules draw an operation and apply it, nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from harness import strategies as draw
from harness.judge import Judge, Listener
from harness.judging import Property
from harness.operations import (
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Generation,
    Operation,
    Owner,
    Prefill,
    Rollback,
    TrimFront,
)
from harness.target import Target


class ProgramMachine(RuleBasedStateMachine):
    """Builds a program operation by operation. Use ``make_machine`` for a class that can run."""

    target: ClassVar[Target]
    properties: ClassVar[tuple[Property, ...]] = ()
    listener: ClassVar[Listener | None] = None
    muted: ClassVar[Collection[str]] = ()

    judge: Judge | None = None

    @initialize(owners=draw.owner_layouts, tokens=draw.prefill_sizes, warm=draw.warm, more=draw.prefill_sizes)
    def begin(self, owners: tuple[Owner, ...], tokens: int, warm: bool, more: int) -> None:
        self.judge = Judge(self.target, owners, self.properties, self.listener, self.muted)
        self._apply(Prefill(tokens))
        if warm and len(owners) > 1:
            self._apply(Prefill(more, 1))

    @rule(sequence=draw.sequences, tokens=draw.chunk_sizes)
    def extend(self, sequence: int, tokens: int) -> None:
        index = self._sequence(sequence)
        fresh = self.judge is not None and self.judge.run.ledgers[index].offset == 0
        self._apply(Prefill(tokens, index) if fresh else Chunk(tokens, index))

    @rule(sequence=draw.sequences, times=draw.decode_times)
    def decode(self, sequence: int, times: int) -> None:
        self._apply(Decode(times, self._sequence(sequence)))

    @rule(sequence=draw.sequences, n=draw.trim_counts, keep=draw.sinks, tokens=draw.chunk_sizes)
    def trim_and_go_on(self, sequence: int, n: int, keep: int, tokens: int) -> None:
        """What a chunked prefill does under a limit, and where this bug class lives: a trim, then a chunk."""
        index = self._sequence(sequence)
        self._apply(TrimFront(n, keep, index))
        self._apply(Chunk(tokens, index))

    @rule(sequence=draw.sequences, n=draw.trim_counts, keep=draw.sinks)
    def trim_front(self, sequence: int, n: int, keep: int) -> None:
        self._apply(TrimFront(n, keep, self._sequence(sequence)))

    @rule(
        sequence=draw.sequences,
        excess=draw.excesses,
        generation=draw.generations,
        keep=draw.shift_keeps,
        n_discard=draw.discards,
    )
    def enforce(self, sequence: int, excess: int, generation: Generation, keep: int, n_discard: int) -> None:
        """The bound is drawn relative to what the sequence holds: most absolute ones would do nothing."""
        index = self._sequence(sequence)
        limit = max(1, self._live_len(index) - excess)
        if generation == "shift":
            self._apply(EnforceMaxKvSize(limit, generation, keep, n_discard, sequence=index))
        else:  # the older generations take neither argument
            self._apply(EnforceMaxKvSize(limit, generation, sequence=index))

    @rule(sequence=draw.sequences, tokens=draw.chunk_sizes, excess=draw.excesses, generation=draw.generations)
    def bounded_prefill(self, sequence: int, tokens: int, excess: int, generation: Generation) -> None:
        """A chunked prefill under a bound, as a server does it: chunk, enforce, chunk, enforce."""
        index = self._sequence(sequence)
        limit = max(1, self._live_len(index) - excess)
        for _ in range(2):
            self._apply(Chunk(tokens, index))
            self._apply(EnforceMaxKvSize(limit, generation, sequence=index))

    @rule(sequence=draw.sequences, n=draw.rollback_counts)
    def rollback(self, sequence: int, n: int) -> None:
        self._apply(Rollback(n, self._sequence(sequence)))

    def teardown(self) -> None:
        if self.judge is not None:
            self.judge.end()

    def _sequence(self, drawn: int) -> int:
        return drawn % len(self.judge.run.owners) if self.judge is not None else 0

    def _live_len(self, index: int) -> int:
        return self.judge.run.ledgers[index].live_len if self.judge is not None else 0

    def _apply(self, operation: Operation) -> None:
        if self.judge is not None and not self.judge.stopped:
            self.judge.apply(operation)


def make_machine(
    name: str,
    target: Target,
    properties: Sequence[Property],
    listener: Listener | None = None,
    muted: Collection[str] = (),
) -> type[ProgramMachine]:
    """A machine class with a name of its own.

    Hypothesis derives random choices and database keys from the class: classes made under one name would give every
    family the same programs and one shared database entry.
    """
    body: dict[str, Any] = {
        "target": target,
        "properties": tuple(properties),
        "listener": listener,
        "muted": frozenset(muted),
    }
    return type(name, (ProgramMachine,), body)
