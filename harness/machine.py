"""The state machine: its rules draw an operation and apply it, nothing else."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, ClassVar

from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from harness import strategies as draw
from harness.judge import Judge, Listener
from harness.judging import Property
from harness.ledger import SequenceLedger
from harness.media import runs
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
        self._apply(Chunk(tokens, index) if self._ledger(index).offset else Prefill(tokens, index))

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
        limit = max(1, self._ledger(index).live_len - excess)
        if generation == "shift":
            self._apply(EnforceMaxKvSize(limit, generation, keep, n_discard, sequence=index))
        else:  # the older generations take neither argument
            self._apply(EnforceMaxKvSize(limit, generation, sequence=index))

    @rule(sequence=draw.sequences, tokens=draw.chunk_sizes, excess=draw.excesses, generation=draw.generations)
    def bounded_prefill(self, sequence: int, tokens: int, excess: int, generation: Generation) -> None:
        """A chunked prefill under a bound, as a server does it: chunk, enforce, chunk, enforce."""
        index = self._sequence(sequence)
        limit = max(1, self._ledger(index).live_len - excess)
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

    def _ledger(self, index: int) -> SequenceLedger:
        return self.judge.run.ledgers[index] if self.judge is not None else SequenceLedger()

    def _operations(self) -> list[Operation]:
        return [step.operation for step in self.judge.run.steps] if self.judge is not None else []

    def _apply(self, operation: Operation) -> None:
        if self.judge is not None and not self.judge.stopped:
            self.judge.apply(operation)


class ImageMachine(ProgramMachine):
    """The same, and one of the prompts always holds images; beside it there may be text, before it or behind."""

    @initialize(
        owners=draw.owner_layouts,
        first=draw.image_prefills(),
        warm=draw.warm,
        second=draw.prefills(1),
        turn=draw.turns,
        early=draw.early_trims,
        tokens=draw.chunk_sizes,
    )
    def begin(
        self,
        owners: tuple[Owner, ...],
        first: Prefill,
        warm: bool,
        second: Prefill,
        turn: bool,
        early: int,
        tokens: int,
    ) -> None:
        """``turn``: the second sequence gets its prompt first. ``early``: a bound is met before the first prompt is
        read to its end, and the next chunk brings more of it."""
        prompts = (first, second) if warm and len(owners) > 1 else (first,)
        self.judge = Judge(self.target, owners, self.properties, self.listener, self.muted)
        for prompt in reversed(prompts) if turn else prompts:
            self._apply(prompt)
        if early and self._ledger(0).offset < len(self._ledger(0).prompt):
            self._apply(TrimFront(early))
            self._apply(Chunk(tokens))

    @rule(sequence=draw.sequences, where=draw.image_positions, tokens=draw.chunk_sizes)
    def roll_back_into_an_image(self, sequence: int, where: int, tokens: int) -> None:
        """Other tokens then stand where the rest of the image stood. Left to chance this would be rare."""
        index = self._sequence(sequence)
        if inside := self._inside_images(index):
            position = inside[where % len(inside)]
            self._apply(Rollback(self._ledger(index).offset - position, index))
        self._apply(Chunk(tokens, index))

    def _inside_images(self, index: int) -> list[int]:
        """Positions behind the first token of an image that were processed and that a rollback can reach."""
        ledger, images = self._ledger(index), self.target.images
        first = next((op for op in self._operations() if op.index == index and isinstance(op, Prefill)), None)
        if first is None or images is None:
            return []
        reach = range(max(ledger.live_start, 0), min(ledger.offset, len(ledger.prompt)))
        return [p for run in runs(first.media, images.frames_apart) for p in run.positions[1:] if p in reach]


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
    base = ProgramMachine if target.images is None else ImageMachine
    return type(name, (base,), body)
