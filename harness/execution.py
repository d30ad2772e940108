"""Applies operations to a ledger and a session side by side, and keeps what happened as Steps.

The state machine, replay and reports all go through here: one operation means one thing everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from harness.images import prompt_input, token_ids
from harness.ledger import Append, SequenceLedger, SequenceState
from harness.media import places
from harness.operations import (
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Operation,
    Owner,
    Prefill,
    Program,
    Rollback,
    TrimFront,
)
from harness.target import CacheLengths, CacheRows, ForwardObservation, PromptInput, RemovalObservation, Target


@dataclass(frozen=True)
class ForwardStep:
    """One forward within a step: what the ledger says was appended and what the target did. ``read``: how many of its
    tokens, the first ones, belong to the ``prompt`` with images that was given before."""

    append: Append
    seen: ForwardObservation
    prompt: PromptInput | None = None
    read: int = 0


@dataclass(frozen=True)
class Told:
    """One sequence after an operation: the ledger's side (state, absolute positions held) and what its caches say."""

    state: SequenceState
    held: tuple[int, ...]
    lengths: tuple[CacheLengths, ...]
    rows: tuple[CacheRows, ...]


@dataclass(frozen=True)
class Step:
    """One operation: the ledger's state on both sides, and the observations."""

    index: int
    operation: Operation
    before: SequenceState
    after: SequenceState
    owner: Owner
    forwards: tuple[ForwardStep, ...] = ()
    expected_removed: int | None = None  # None for an operation that removes nothing by nature
    removal: RemovalObservation | None = None
    told: tuple[Told, ...] = ()  # of every sequence, in order; () after an error

    @property
    def error(self) -> str | None:
        if self.removal is not None and self.removal.error is not None:
            return self.removal.error
        return next((f.seen.error for f in self.forwards if f.seen.error is not None), None)


class Execution:
    """A program in the making on one target. After an error the session is not to be trusted: ``stopped``.

    ``tell``: ask the caches after every operation (a run that is only compared by its logits need not).
    """

    def __init__(self, target: Target, owners: tuple[Owner, ...] = ("pool",), tell: bool = True) -> None:
        self._tell = tell
        self.target = target
        self.owners = owners
        self.ledgers = [SequenceLedger(owner) for owner in owners]
        self.steps: list[Step] = []
        self._processed = [0] * len(owners)
        self._inputs: list[PromptInput | None] = [None] * len(owners)  # whose first tokens _prompts are
        self._prompts: list[tuple[int, ...]] = [()] * len(owners)  # tokens of the prompts with images, from position 0
        self._session = target.open(owners)

    @property
    def program(self) -> Program:
        return Program(tuple(step.operation for step in self.steps), self.owners)

    @property
    def stopped(self) -> bool:
        return bool(self.steps) and self.steps[-1].error is not None

    def apply(self, operation: Operation) -> Step:
        """Apply one operation; returns its Step. Raises RuntimeError when the execution has stopped."""
        if self.stopped:
            raise RuntimeError("the execution stopped at an error; open a new one")
        ledger = self.ledgers[operation.index]
        before = ledger.state()
        forwards: tuple[ForwardStep, ...] = ()
        expected = removal = None
        if isinstance(operation, Prefill) and operation.media:
            forwards = (self._read(operation),)
        elif isinstance(operation, (Prefill, Chunk)):
            forwards = (self._forward(operation.index, operation.tokens),)
        elif isinstance(operation, Decode):
            forwards = tuple(self._decode(operation))
        else:
            expected = ledger.remove(operation)
            removal = self._remove(operation)
            self._prompts[operation.index] = self._prompts[operation.index][: len(ledger.prompt)]
        failed = any(f.seen.error for f in forwards) or (removal is not None and removal.error is not None)
        step = Step(
            index=len(self.steps),
            operation=operation,
            before=before,
            after=ledger.state(),
            owner=ledger.owner,
            forwards=forwards,
            expected_removed=expected,
            removal=removal,
            told=()
            if failed or not self._tell
            else tuple(self._told(sequence) for sequence in range(len(self.owners))),
        )
        self.steps.append(step)
        return step

    def _told(self, sequence: int) -> Told:
        ledger = self.ledgers[sequence]
        lengths, rows = self._session.lengths(sequence), self._session.rows(sequence)
        return Told(ledger.state(), tuple(ledger.held), lengths, rows)

    def _read(self, operation: Prefill) -> ForwardStep:
        """The first forward of a prompt with images. ValueError from a target that takes none, and on a second one."""
        images, ledger = self.target.images, self.ledgers[operation.sequence]
        if images is None:
            raise ValueError(f"{operation.text()}: {self.target.identity.full_name} takes no images")
        if self._processed[operation.sequence]:
            raise ValueError(f"{operation.text()} has images, but is not the first forward of its sequence")
        prompt = prompt_input(operation.sequence, operation.media, operation.tokens, self.target.vocab_size, images)
        ledger.prompt = places(operation.media, images.frames_apart, len(prompt.tokens))
        self._prompts[operation.sequence], self._inputs[operation.sequence] = prompt.tokens, prompt
        return self._forward(operation.sequence, operation.tokens, prompt)

    def _forward(self, sequence: int, count: int, prompt: PromptInput | None = None) -> ForwardStep:
        """What is left of a prompt comes first, then text."""
        ledger = self.ledgers[sequence]
        left = self._prompts[sequence][ledger.offset : ledger.offset + count]
        number = self._processed[sequence] + len(left)
        text = token_ids(sequence, count - len(left), number, self.target.vocab_size, self.target.images)
        append = ledger.append(count, sum(self._processed))
        self._processed[sequence] += count
        seen = self._session.forward(sequence, (*left, *text), prompt)
        return ForwardStep(append, seen, self._inputs[sequence] if left else None, len(left))

    def _decode(self, operation: Decode) -> Iterator[ForwardStep]:
        for _ in range(operation.times):
            step = self._forward(operation.index, 1)
            yield step
            if step.seen.error is not None:
                return

    def _remove(self, operation: Operation) -> RemovalObservation:
        if isinstance(operation, TrimFront):
            return self._session.trim_front(operation.sequence, operation.n, operation.keep)
        if isinstance(operation, Rollback):
            return self._session.rollback(operation.sequence, operation.n)
        if isinstance(operation, EnforceMaxKvSize):
            return self._session.enforce(operation)
        raise TypeError(f"unknown operation {operation!r}")


def execute(target: Target, program: Program, tell: bool = True) -> Execution:
    """Run a whole program (up to the first error) and return its Execution."""
    run = Execution(target, program.owners, tell)
    for operation in program.operations:
        run.apply(operation)
        if run.stopped:
            break
    return run
