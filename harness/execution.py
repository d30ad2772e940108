"""Applies operations to a ledger and a session side by side, and keeps what happened as Steps.

The state machine, replay and reports all go through here: one operation means one thing everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from harness.images import prompt_input, token_ids
from harness.ledger import Append, PoolLedger, SequenceLedger, SequenceState
from harness.media import places, runs
from harness.operations import (
    COPIES,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    Owner,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.target import (
    CacheLengths,
    CacheMemory,
    CacheRows,
    Capability,
    CopyObservation,
    ForwardObservation,
    PromptInput,
    RemovalObservation,
    Session,
    Target,
)


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
    memory: tuple[CacheMemory, ...] = ()


@dataclass(frozen=True)
class Step:
    """One operation: the ledger's state on both sides, and the observations.

    ``number``: how many tokens its sequence had ever processed before. ``effective``: did an operation on the whole
    state do anything, by the ledger? ``replaced``: the sequence that now has another state in the place of its own.
    """

    index: int
    operation: Operation
    before: SequenceState
    after: SequenceState
    owner: Owner
    forwards: tuple[ForwardStep, ...] = ()
    expected_removed: int | None = None  # None for an operation that removes nothing by nature
    removal: RemovalObservation | None = None
    told: tuple[Told, ...] = ()  # of every sequence, in order; () after an error
    number: int = 0
    effective: bool | None = None  # None for other operations
    replaced: int | None = None
    copied: CopyObservation | None = None

    @property
    def error(self) -> str | None:
        if self.removal is not None and self.removal.error is not None:
            return self.removal.error
        if self.copied is not None and self.copied.error is not None:
            return self.copied.error
        return next((f.seen.error for f in self.forwards if f.seen.error is not None), None)


class Execution:
    """A program in the making on one target. After an error the session is not to be trusted: ``stopped``.

    ``tell``: ask the caches after every operation (a run that is only compared by its logits need not).
    """

    def __init__(self, target: Target, owners: tuple[Owner, ...] = ("pool",), tell: bool = True) -> None:
        self._tell = tell
        self.target = target
        self.owners = owners
        self._pool = PoolLedger(owners)
        self.steps: list[Step] = []
        self._processed = [0] * len(owners)  # only ever grows: no copy gets the same tokens again
        self._total = 0  # tokens of all sequences, processed here
        self._session = target.open(owners)

    @property
    def ledgers(self) -> list[SequenceLedger]:
        """Of every sequence. A Restore, Fork or Reset puts another one in its place."""
        return self._pool.sequences

    @property
    def program(self) -> Program:
        return Program(tuple(step.operation for step in self.steps), self.owners)

    @property
    def stopped(self) -> bool:
        return bool(self.steps) and self.steps[-1].error is not None

    def apply(self, operation: Operation, number: int | None = None) -> Step:
        """Apply one operation; returns its Step. Raises RuntimeError when the execution has stopped.

        ``number``: what ``Step.number`` is to be, for a run that leaves out a part of another and must give the rest of
        it the same tokens.
        """
        if self.stopped:
            raise RuntimeError("the execution stopped at an error; open a new one")
        index = operation.index
        ledger = self.ledgers[index]
        before = ledger.state()
        if number is not None:
            self._processed[index] = number
        number = self._processed[index]
        forwards: tuple[ForwardStep, ...] = ()
        expected = removal = effective = replaced = copied = None
        if isinstance(operation, Prefill) and operation.media:
            forwards = (self._read(operation),)
        elif isinstance(operation, (Prefill, Chunk)):
            forwards = (self._forward(index, operation.tokens),)
        elif isinstance(operation, Decode):
            forwards = tuple(self._decode(operation))
        elif isinstance(operation, Verify):
            forwards = (self._forward(index, operation.drafts),)
            rejected = operation.drafts - operation.accept
            if rejected and forwards[0].seen.error is None:
                expected, removal = ledger.rollback(rejected), self._session.rollback(index, rejected)
        elif isinstance(operation, COPIES):
            effective = self._pool.apply(operation)
            copied = copy_state(self._session, operation)
            if effective and isinstance(operation, (Restore, Fork, Reset)):
                replaced = operation.into if isinstance(operation, Fork) else index
        else:
            expected, removal = ledger.remove(operation), remove_keys(self._session, operation)
        step = Step(
            index=len(self.steps),
            operation=operation,
            before=before,
            after=self.ledgers[index].state(),
            owner=ledger.owner,
            forwards=forwards,
            expected_removed=expected,
            removal=removal,
            number=number,
            effective=effective,
            replaced=replaced,
            copied=copied,
        )
        if self._tell and step.error is None:
            step = replace(step, told=tuple(map(self._told, range(len(self.owners)))))
        self.steps.append(step)
        return step

    def _told(self, sequence: int) -> Told:
        ledger = self.ledgers[sequence]
        lengths, rows = self._session.lengths(sequence), self._session.rows(sequence)
        memory = self._session.memory(sequence) if Capability.BYTES in self.target.capabilities else ()
        return Told(ledger.state(), tuple(ledger.held), lengths, rows, memory)

    def _read(self, operation: Prefill) -> ForwardStep:
        """The first forward of a prompt with images. ValueError from a target that takes none, and on a second one."""
        images, ledger = self.target.images, self.ledgers[operation.sequence]
        if images is None:
            raise ValueError(f"{operation.text()}: {self.target.identity.full_name} takes no images")
        if ledger.begun:
            raise ValueError(f"{operation.text()} has images, but is not the first forward of its sequence")
        index, media = operation.sequence, operation.media
        number, vocab_size = self._processed[index], self.target.vocab_size
        prompt = prompt_input(index, media, operation.tokens, vocab_size, images, number)
        placed = tuple(run.positions for run in runs(media, images.frames_apart))
        ledger.read(prompt.tokens, places(media, images.frames_apart, len(prompt.tokens)), placed, prompt)
        return self._forward(index, operation.tokens, prompt)

    def _forward(self, sequence: int, count: int, prompt: PromptInput | None = None) -> ForwardStep:
        """What is left of a prompt comes first, then text."""
        ledger = self.ledgers[sequence]
        left = ledger.prompt_tokens[ledger.offset : ledger.offset + count]
        number = self._processed[sequence] + len(left)
        text = token_ids(sequence, count - len(left), number, self.target.vocab_size, self.target.images)
        append = ledger.append(count, self._total)
        self._processed[sequence] += count
        self._total += count
        seen = self._session.forward(sequence, (*left, *text), prompt)
        source = ledger.source if left and isinstance(ledger.source, PromptInput) else None
        return ForwardStep(append, seen, source, len(left))

    def _decode(self, operation: Decode) -> Iterator[ForwardStep]:
        for _ in range(operation.times):
            step = self._forward(operation.index, 1)
            yield step
            if step.seen.error is not None:
                return


def remove_keys(session: Session, operation: Operation) -> RemovalObservation:
    """Give an operation that removes keys to a session."""
    if isinstance(operation, TrimFront):
        return session.trim_front(operation.sequence, operation.n, operation.keep)
    if isinstance(operation, Rollback):
        return session.rollback(operation.sequence, operation.n)
    if isinstance(operation, EnforceMaxKvSize):
        return session.enforce(operation)
    raise TypeError(f"unknown operation {operation!r}")


def copy_state(session: Session, operation: Operation) -> CopyObservation:
    """Give an operation on the whole state of a sequence to a session."""
    if isinstance(operation, Snapshot):
        return session.snapshot(operation.sequence, operation.slot)
    if isinstance(operation, Restore):
        return session.restore(operation.sequence, operation.slot)
    if isinstance(operation, Fork):
        return session.fork(operation.sequence, operation.into)
    if isinstance(operation, SaveLoad):
        return session.save_and_load(operation.sequence)
    if isinstance(operation, Reset):
        return session.reset(operation.sequence)
    raise TypeError(f"unknown operation {operation!r}")


def execute(target: Target, program: Program, tell: bool = True) -> Execution:
    """Run a whole program (up to the first error) and return its Execution."""
    return execute_numbered(target, program.owners, [(operation, None) for operation in program.operations], tell)


def execute_numbered(
    target: Target, owners: tuple[Owner, ...], lines: Iterable[tuple[Operation, int | None]], tell: bool = False
) -> Execution:
    """The same for operations with the numbers of their first tokens (see ``Execution.apply``)."""
    run = Execution(target, owners, tell)
    for operation, number in lines:
        run.apply(operation, number)
        if run.stopped:
            break
    return run
