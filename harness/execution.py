"""Applies operations to a ledger and a session side by side, and keeps what happened as Steps.

The state machine, replay and reports all go through here: one operation means one thing everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property

from harness.acting import copy_state, remove_keys
from harness.emptying import Emptied, empty, size
from harness.images import placed_for, prompt_input, token_ids
from harness.ledger import Append, PoolLedger, SequenceLedger
from harness.media import places, runs
from harness.operations import (
    COPIES,
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Operation,
    Owner,
    Prefill,
    Program,
    QuantizeCache,
    Reset,
    Restore,
    Verify,
)
from harness.quantised import GivenRows
from harness.steps import ForwardStep, Step
from harness.target import (
    Capability,
    EngineGone,
    ForwardObservation,
    PromptInput,
    Target,
)
from harness.telling import Told, ask

_NOTHING = Append((), range(0), (), (), range(0))


class Execution:
    """A program in the making on one target. After an error the session is not to be trusted, and one that has
    ``parted`` from the ledger has nothing to be compared with: ``stopped``.

    ``tell``: ask the caches after every operation (a run that is only compared by its logits need not); ``attention``:
    have the values of attention calls told, and arguments watched, by a target that can. ``given``: what quantised
    caches were given.
    """

    def __init__(
        self, target: Target, owners: tuple[Owner, ...] = ("pool",), tell: bool = True, attention: bool = False
    ) -> None:
        self._tell = tell
        self.target = target
        self.owners = owners
        widths = target.row_widths if Capability.QUANTISE in target.capabilities else ()
        pads = Capability.UNPADDED not in target.capabilities
        self._pool = PoolLedger(owners, target.rules, target.row_storage, widths, pads)
        self.given = GivenRows()
        self.steps: list[Step] = []
        self._processed = [0] * len(owners)  # only ever grows: no copy gets the same tokens again
        self._total = 0  # tokens of all sequences, processed here
        self._session = target.open(owners)
        self._opened: int | str = 0  # bytes that the engine holds before anything is done, or why it cannot tell
        if tell and Capability.FOOTPRINT in target.capabilities:
            try:
                self._opened = size(self._session)
            except NotImplementedError:  # a misuse, as elsewhere
                raise
            except Exception as failure:  # an observation, made where it is asked for
                self._opened = f"telling its size raised {type(failure).__name__}: {failure}"
        if attention and Capability.ATTENTION_VALUES in target.capabilities:
            self._session.tell_attention()
        self._watches = attention and Capability.ARGUMENTS in target.capabilities
        if self._watches:
            self._session.watch_arguments()

    @property
    def ledgers(self) -> list[SequenceLedger]:
        """Of every sequence. A Restore, Fork or Reset puts another one in its place."""
        return self._pool.sequences

    @property
    def batch(self) -> tuple[int, ...]:
        """The sequences in the batch, by row."""
        return self._pool.batch

    @property
    def program(self) -> Program:
        return Program(tuple(step.operation for step in self.steps), self.owners)

    @cached_property
    def emptied(self) -> Emptied:
        """What is left of a run that is over: its sequences and slots are emptied, once, and no operation may follow.
        For a target that can tell it (see ``emptying.empty``)."""
        if isinstance(self._opened, str):
            return Emptied(error=self._opened)
        return empty(self._session, self.owners, self._pool.batch, sorted(self._pool.slots), self._opened)

    @property
    def stopped(self) -> bool:
        return bool(self.steps) and (self.steps[-1].error is not None or self.steps[-1].parted)

    def apply(
        self, operation: Operation, numbers: tuple[int, ...] | None = None, rows: tuple[int, ...] | None = None
    ) -> Step:
        """Apply one operation; returns its Step. Raises RuntimeError when the execution has stopped.

        ``numbers`` and ``rows``: what those of the Step are to be, for a run that leaves out a part of another and must
        give the rest of it the same tokens in the same batches.
        """
        if self.stopped or "emptied" in self.__dict__:
            raise RuntimeError("the execution has stopped; open a new one")
        index = operation.index
        ledger = self.ledgers[index]
        before = ledger.state()
        if numbers is not None:
            self._processed = list(numbers)
        numbers = tuple(self._processed)
        forwards: tuple[ForwardStep, ...] = ()
        expected = removal = effective = replaced = copied = None
        ledger.refused = False
        if moved := self._pool.gather(operation):
            copied = self._session.batch(self._pool.batch)
        if rows is not None and rows != self._pool.batch:
            self._pool.batch = rows
            self._session.batch(())
            copied = self._session.batch(rows)
        if copied is not None and copied.error is not None:
            pass  # nothing more can be asked of this session
        elif isinstance(operation, Batch):
            effective = moved
        elif isinstance(operation, (BatchForward, BatchDecode)):
            forwards = tuple(self._batch_forwards(operation))
        elif isinstance(operation, Prefill) and operation.media:
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
            numbers=numbers,
            effective=effective,
            replaced=replaced,
            copied=copied,
            rows=self._pool.batch,
            refuses=ledger.refused,
        )
        try:
            step = self._asked(step)
        except EngineGone as gone:
            step = replace(step, untold=str(gone))
        self.steps.append(step)
        return step

    def _asked(self, step: Step) -> Step:
        """With what the session tells behind it."""
        everybody = range(len(self.owners))
        if self._watches:
            step = replace(step, arguments=self._session.arguments())
        if self._tell and step.error is None:
            step = replace(step, told=tuple(map(self._told, everybody)))
            for forward in step.forwards:
                self.given.take(forward.append.numbers, forward.append.positions, forward.seen.given)
            if isinstance(step.operation, QuantizeCache) and step.effective and self.steps:
                was = self.steps[-1].told[
                    step.operation.index
                ]  # as given: rows that were not quantised stay what they were
                self.given.take(was.numbers, was.held, was.rows)
        elif self._tell:
            others = (index for index in everybody if index not in step.acted)
            step = replace(step, bystanders=tuple((index, self._told(index)) for index in others))
        return step

    def _told(self, sequence: int) -> Told:
        return ask(self.target, self._session, self.ledgers[sequence], sequence)

    def _read(self, operation: Prefill) -> ForwardStep:
        """The first forward of a prompt with images. ValueError from a target that takes none, and on a second one."""
        images, ledger = self.target.images, self.ledgers[operation.sequence]
        if images is None:
            raise ValueError(f"{operation.text()}: {self.target.identity.full_name} takes no images")
        if ledger.begun:
            raise ValueError(f"{operation.text()} has images, but is not the first forward of its sequence")
        index, media = operation.sequence, placed_for(operation.media, images)
        number, vocab_size = self._processed[index], self.target.vocab_size
        prompt = prompt_input(index, media, operation.tokens, vocab_size, images, number)
        placed = tuple(run.positions for run in runs(media, images.frames_apart))
        ledger.read(prompt.tokens, places(media, images.frames_apart, len(prompt.tokens)), placed, prompt)
        return self._forward(index, operation.tokens, prompt)

    def _forward(self, sequence: int, count: int, prompt: PromptInput | None = None) -> ForwardStep:
        step = self._next(sequence, count)
        append = self.ledgers[sequence].append(count, self._total)
        self._total += count
        return replace(step, append=append, seen=self._session.forward(sequence, step.seen.tokens, prompt))

    def _next(self, sequence: int, count: int) -> ForwardStep:
        """The next ``count`` tokens of a sequence, in a forward that has not been made yet: what is left of a prompt
        comes first, then text."""
        ledger, number = self.ledgers[sequence], self._processed[sequence]
        left = ledger.prompt_tokens[ledger.offset : ledger.offset + count]
        vocab_size, images = self.target.vocab_size, self.target.images
        text = token_ids(sequence, count - len(left), number + len(left), vocab_size, images)
        self._processed[sequence] += count
        source = ledger.source if left and isinstance(ledger.source, PromptInput) else None
        unseen = ForwardObservation((*left, *text), None)
        return ForwardStep(_NOTHING, unseen, source, len(left), sequence, number, ledger.removed)

    def _batch_forwards(self, operation: BatchForward | BatchDecode) -> Iterator[ForwardStep]:
        rows = self._pool.batch
        for _ in range(operation.times if isinstance(operation, BatchDecode) else 1):
            if not rows:
                return
            counts = operation.of(len(rows)) if isinstance(operation, BatchForward) else (1,) * len(rows)
            steps = [self._next(row, count) for row, count in zip(rows, counts, strict=True)]
            appends = self._pool.append(counts, self._total)
            self._total += sum(counts)
            seen = self._session.forward_batch([step.seen.tokens for step in steps])
            for step, append, each in zip(steps, appends, seen, strict=True):
                yield replace(step, append=append, seen=each)
            if any(each.error is not None for each in seen):
                return

    def _decode(self, operation: Decode) -> Iterator[ForwardStep]:
        for _ in range(operation.times):
            step = self._forward(operation.index, 1)
            yield step
            if step.seen.error is not None:
                return


def execute(target: Target, program: Program, tell: bool = True, attention: bool = False) -> Execution:
    """Run a whole program (up to where it stops) and return its Execution."""
    return execute_numbered(
        target, program.owners, [(operation, None, None) for operation in program.operations], tell, attention
    )


def execute_numbered(
    target: Target,
    owners: tuple[Owner, ...],
    lines: Iterable[tuple[Operation, tuple[int, ...] | None, tuple[int, ...] | None]],
    tell: bool = False,
    attention: bool = False,
) -> Execution:
    """The same for operations with the numbers of their tokens and the rows of their batch: see ``Execution.apply``."""
    run = Execution(target, owners, tell, attention)
    for operation, numbers, rows in lines:
        run.apply(operation, numbers, rows)
        if run.stopped:
            break
    return run
