"""The state machine: its rules draw an operation and apply it, nothing else."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import ClassVar

from hypothesis.stateful import initialize, precondition, rule

from harness import strategies as draw
from harness.batch_rules import BatchRules
from harness.bound_rules import BoundRules
from harness.judge import Judge, Listener
from harness.judging import Property
from harness.operations import (
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Owner,
    Prefill,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.program_rules import able
from harness.quantised import takes_affine
from harness.tally import GROWTH
from harness.target import Capability
from harness.turns import Turns


class ProgramMachine(BatchRules, BoundRules):
    """Builds a program operation by operation. Use ``make_machine`` for a class that can run."""

    properties: ClassVar[tuple[Property, ...]] = ()
    listener: ClassVar[Listener | None] = None
    muted: ClassVar[Collection[str]] = ()
    turns: ClassVar[Turns | None] = None

    ending: draw.Few = ()

    @initialize(
        owners=draw.owner_layouts,
        tokens=draw.prefill_sizes,
        start=draw.second_starts,
        more=draw.prefill_sizes,
        frame=draw.frames,
    )
    def begin(self, owners: tuple[Owner, ...], tokens: int, start: str, more: int, frame: draw.Frame) -> None:
        self._begin(owners, Prefill(tokens), Prefill(more, 1), start, frame)

    @rule(sequence=draw.sequences, tokens=draw.chunk_sizes)
    def extend(self, sequence: int, tokens: int) -> None:
        self._extend(self._sequence(sequence), tokens)

    @rule(sequence=draw.sequences, times=draw.decode_times)
    def decode(self, sequence: int, times: int) -> None:
        self._apply(Decode(times, self._sequence(sequence)))

    @able(Capability.FRONT_TRIM)
    @rule(sequence=draw.sequences, n=draw.trim_counts, keep=draw.sinks, tokens=draw.chunk_sizes)
    def trim_and_go_on(self, sequence: int, n: int, keep: int, tokens: int) -> None:
        """What a chunked prefill does under a limit, and where this bug class lives: a trim, then a chunk."""
        index = self._sequence(sequence)
        self._apply(TrimFront(n, keep, index))
        self._apply(Chunk(tokens, index))

    @able(Capability.FRONT_TRIM)
    @rule(sequence=draw.sequences, n=draw.trim_counts, keep=draw.sinks)
    def trim_front(self, sequence: int, n: int, keep: int) -> None:
        self._apply(TrimFront(n, keep, self._sequence(sequence)))

    @able(Capability.FRONT_TRIM, Capability.ROLLBACK)
    @rule(
        sequence=draw.sequences,
        trims=draw.two_trims,
        keeps=draw.two_keeps,
        tokens=draw.chunk_sizes,
        everything=draw.rewinds,
        times=draw.decode_times,
    )
    def trim_twice_and_roll_back(
        self, sequence: int, trims: tuple[int, int], keeps: tuple[int, int], tokens: int, everything: bool, times: int
    ) -> None:
        """Back to where the second trim was made, or to the first key that it left. By chance this would be rare."""
        index = self._sequence(sequence)
        self._apply(TrimFront(trims[0], keeps[0], index))
        self._apply(TrimFront(trims[1], keeps[1], index))
        self._apply(Chunk(tokens, index))
        self._apply(Rollback(10_000 if everything else tokens, index))
        self._apply(Decode(times, index))

    @able(Capability.ROLLBACK)
    @rule(sequence=draw.sequences, n=draw.rollback_counts, deep=draw.deep)
    def rollback(self, sequence: int, n: int, deep: draw.Deep) -> None:
        self._apply(Rollback(n, self._sequence(sequence, deep)))

    @able(Capability.ROLLBACK)
    @rule(
        sequence=draw.sequences, drafts=draw.drafts, accept=draw.accepts, rounds=draw.rounds, tokens=draw.decode_times
    )
    def speculate(self, sequence: int, drafts: int, accept: int, rounds: int, tokens: int) -> None:
        """Verify rounds, and the tokens that follow where rejected drafts stood."""
        index = self._sequence(sequence)
        for _ in range(rounds):
            self._apply(Verify(drafts, min(accept, drafts), index))
        self._apply(Decode(tokens, index))

    @able(Capability.SNAPSHOT)
    @rule(sequence=draw.sequences, slot=draw.slots)
    def snapshot(self, sequence: int, slot: int) -> None:
        self._apply(Snapshot(slot, self._sequence(sequence)))

    @able(Capability.SNAPSHOT)
    @rule(sequence=draw.sequences, slot=draw.slots, tokens=draw.chunk_sizes)
    def restore_and_go_on(self, sequence: int, slot: int, tokens: int) -> None:
        index = self._sequence(sequence)
        self._apply(Restore(slot, index))
        self._extend(index, tokens)

    @able(Capability.SNAPSHOT)
    @rule(
        sequence=draw.sequences,
        slot=draw.slots,
        detour=draw.detours,
        n=draw.chunk_sizes,
        times=draw.times_back,
        tokens=draw.chunk_sizes,
        deep=draw.deep,
    )
    def leave_and_come_back(
        self, sequence: int, slot: int, detour: str, n: int, times: int, tokens: int, deep: draw.Deep
    ) -> None:
        """A snapshot, something else, and back, once or twice."""
        index = self._sequence(sequence, deep)
        self._apply(Snapshot(slot, index))
        for _ in range(times):
            self._detour(detour, n, index)
            self._apply(Restore(slot, index))
            self._extend(index, tokens)

    @precondition(lambda self: Capability.FORK in self.target.capabilities and self._several())
    @rule(sequence=draw.sequences, tokens=draw.chunk_sizes, other=draw.decode_times, kept=draw.kept, deep=draw.deep)
    def fork_and_go_on(self, sequence: int, tokens: int, other: int, kept: bool, deep: draw.Deep) -> None:
        """A shared prefix, then both go their own ways. ``kept``: a third has it as well."""
        index = self._sequence(sequence, deep)
        if kept:
            self._apply_able((Snapshot(0, index),))
        into = self._neighbour(index)
        self._apply(Fork(into, index))
        self._extend(index, tokens)
        self._apply(Decode(other, into))

    @able(Capability.SAVE_LOAD)
    @rule(sequence=draw.sequences, tokens=draw.chunk_sizes, deep=draw.deep)
    def save_load_and_go_on(self, sequence: int, tokens: int, deep: draw.Deep) -> None:
        index = self._sequence(sequence, deep)
        self._apply(SaveLoad(index))
        self._extend(index, tokens)

    @able(Capability.RESET)
    @rule(sequence=draw.sequences, tokens=draw.prefill_sizes)
    def reset_and_reuse(self, sequence: int, tokens: int) -> None:
        index = self._sequence(sequence)
        self._apply(Reset(index))
        self._extend(index, tokens)

    @able(Capability.QUANTISE)
    @rule(
        sequence=draw.sequences,
        storages=draw.storages,
        fresh=draw.freshly,
        misfit=draw.misfits,
        tokens=draw.chunk_sizes,
        deep=draw.deep,
    )
    def quantise_and_go_on(
        self, sequence: int, storages: draw.Storages, fresh: bool, misfit: bool, tokens: int, deep: draw.Deep
    ) -> None:
        """``fresh``: of a sequence that starts again, so that its caches hold no row whose width they could see: what
        does not fit must be refused all the same."""
        index = self._sequence(sequence, () if fresh else deep)
        if fresh:
            self._apply_able((Reset(index),))
        self._quantise(index, storages, misfit or fresh)
        self._extend(index, tokens)

    def teardown(self) -> None:
        if self.judge is not None:
            self._apply_able(self._ending())
            self._shorten_long_ones()
            self.judge.end()

    def _begin(
        self,
        owners: tuple[Owner, ...],
        first: Prefill,
        second: Prefill,
        start: str,
        frame: draw.Frame,
        turn: bool = False,
    ) -> None:
        """``turn``: the second sequence gets its prefill first."""
        early, self.ending = frame
        able = self.target.capabilities
        if Capability.SEQUENCES not in able:
            owners = owners[:1]
        if Capability.OWNERSHIP not in able:
            owners = tuple("pool" for _ in owners)
        self.judge = Judge(self.target, owners, self.properties, self.listener, self.muted, self.turns)
        two = len(owners) > 1 and start != "empty"
        fork = start == "fork" and Capability.FORK in able and self._several()
        if two and turn and not fork:
            self._apply(second)
        self._apply(first)
        self._apply_able(early)
        if two and (fork or not turn):
            self._apply(Fork(1) if fork else second)
        if fork:
            for third in range(2, len(owners)):  # three have the same keys, as requests with the same system prompt do
                self._apply(Fork(third))

    def _ending(self) -> draw.Few:
        """As drawn. Where caches can become affine they do, instead of Int8, which the many others can only become."""
        if not takes_affine(self.target):
            return self.ending
        return tuple(
            dataclasses.replace(operation, storage="affine4") if isinstance(operation, QuantizeCache) else operation
            for operation in self.ending
        )

    def _shorten_long_ones(self) -> None:
        """What grew is cut to two keys: left to chance, memory that is not given back would rarely show."""
        for index in range(len(self.judge.run.owners)) if self.judge is not None else ():
            live = self._ledger(index).live_len
            if live > GROWTH:
                self._apply_able((TrimFront(live - 2, sequence=index),))

    def _detour(self, kind: str, n: int, index: int) -> None:
        able = self.target.capabilities
        if kind == "decode":
            self._apply(Decode(min(n, 8), index))
        elif kind == "trim" and Capability.FRONT_TRIM in able:
            self._apply(TrimFront(n, sequence=index))
        elif kind == "rollback" and Capability.ROLLBACK in able:
            self._apply(Rollback(n, index))
            self._extend(index, n)
        elif kind == "enforce" and Capability.ENFORCE in able:
            self._apply(EnforceMaxKvSize(n, "sinks", sequence=index))
        elif kind == "reset" and Capability.RESET in able:
            self._apply(Reset(index))
        elif kind == "fork" and Capability.FORK in able and (into := self._neighbour(index)) >= 0:
            self._apply(Fork(into, index))  # three have these keys now, and two of them go their own ways
            self._apply(Decode(min(n, 8), index))
            self._apply(Decode(1, into))
        else:
            self._extend(index, n)
