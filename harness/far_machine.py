"""State machines of programs that are far from small: hundreds of keys and positions, or four sequences and more.

Ordinary programs are small, because a bug that shows in eight tokens is found sooner and read more easily there. Some
show nowhere else: the second time that a cache grows, a ring wider than a growth step, a table of angles that ends,
the fourth row of a batch. Programs of this kind cost ten of the others, so a campaign has few of them, behind those."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis.stateful import initialize, precondition, rule

from harness import far_strategies as far
from harness import strategies as draw
from harness.image_machine import ImageMachine
from harness.machine import ProgramMachine
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Owner,
    Prefill,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
)
from harness.program_rules import able
from harness.serving_machine import ServingMachine
from harness.target import Capability

CROWD = 4  # sequences; ordinary programs have up to three
ROUND = 350  # single tokens: once round the widest ring that is judged, and some more
ROUNDS = (310, 310, 320, 340, 380, 450, 580, 588, 596)
"""The same, to end anywhere on a ring that had hardly come round before, and often behind its first 256 slots."""


class FarMachine(ProgramMachine):
    """A long sequence, alone or with one beside it, or a crowd."""

    @initialize(shape=far.shapes, frame=draw.frames)
    def begin(self, shape: far.Shape, frame: draw.Frame) -> None:
        self._begin_far(shape, frame, Prefill(shape.tokens[0]), shape.tokens[1:])

    def _begin_far(self, shape: far.Shape, frame: draw.Frame, first: Prefill, rest: Sequence[int]) -> None:
        """``first`` is the prompt of the first sequence, ``rest`` of its tokens follow as chunks, unless in a crowd."""
        able = self.target.capabilities
        crowd = shape.crowd and not self._wide() and {Capability.SEQUENCES, Capability.BATCH} <= able
        owners: tuple[Owner, ...] = tuple("pool" for _ in shape.lengths) if crowd else shape.owners
        start = "prefill" if crowd or not shape.forks else "fork"
        self._begin(owners, first, Prefill(shape.lengths[1], 1), start, frame)
        if not crowd:
            for tokens in rest:
                self._apply(Chunk(tokens))
            if shape.crowd and self._wide():  # a crowd of short sequences does not fill what is wide
                self._apply(Chunk(280))
                self._apply(Decode(ROUNDS[shape.lengths[1] - 1]))
                if shape.lengths[3] % 2:  # a few go, or all but a few
                    self._apply_able((TrimFront(shape.lengths[2] if shape.forks else self._all_but(shape.lengths[2])),))
                self._apply(Chunk(1 + shape.lengths[2]))
            return
        for index, tokens in enumerate(shape.lengths[2:], 2):
            self._apply_able((Fork(index),) if shape.forks and index % 2 else (Prefill(tokens, index),))
        self._gather(tuple(range(len(owners))))
        self._apply(BatchForward(shape.lengths[::-1]))

    @rule(tokens=far.growths)
    def grow(self, tokens: int) -> None:
        """Another growth step of the first sequence, or a part of one."""
        self._apply(Chunk(tokens, self._long()))

    @able(Capability.ROLLBACK)
    @rule(tokens=far.growths, fewer=far.anyone)
    def roll_back_far(self, tokens: int, fewer: int) -> None:
        """About as much as came in one forward, or what that grew the cache by; other tokens come in its place."""
        index = self._long()
        self._extend(index, tokens)
        self._apply(Rollback(max(1, tokens - fewer), index))
        self._extend(index, 3)

    @precondition(lambda self: self._wide())
    @rule(tokens=far.growths)
    def turn_what_is_wide(self, tokens: int) -> None:
        """Token by token once round a ring, or past the edge of a chunk."""
        index = self._long()
        self._apply(Decode(ROUND, index))
        self._extend(index, tokens)
        self._apply(Decode(5, index))

    @able(Capability.QUANTISE)
    @rule(storages=draw.storages, tokens=draw.chunk_sizes)
    def quantise_what_is_long(self, storages: draw.Storages, tokens: int) -> None:
        index = self._long()
        self._quantise(index, storages)
        self._extend(index, tokens)

    @able(Capability.FRONT_TRIM, Capability.ROLLBACK)
    @rule(sequence=far.anyone, gap=draw.two_trims, tokens=draw.chunk_sizes, further=far.over_the_gap)
    def roll_back_over_the_gap(self, sequence: int, gap: tuple[int, int], tokens: int, further: int) -> None:
        """Behind sinks there is a gap, and a rollback goes on in front of it: it drops slots, not positions."""
        index = self._sequence(sequence)
        self._extend(index, 4)
        keep, dropped = gap
        self._apply(TrimFront(max(1, self._ledger(index).live_len - keep - dropped), keep, index))
        self._apply(Chunk(tokens, index))
        self._apply(Rollback(tokens + dropped + further, index))
        self._apply(Decode(2, index))

    @able(Capability.SNAPSHOT)
    @rule(sequence=far.anyone, first=draw.chunk_sizes, second=draw.chunk_sizes)
    def keep_two_and_return_to_the_first(self, sequence: int, first: int, second: int) -> None:
        index = self._sequence(sequence)
        self._extend(index, 1)
        self._apply(Snapshot(2, index))
        self._extend(index, first)
        self._apply(Snapshot(3, index))
        self._apply(Restore(2, index))
        self._extend(index, second)
        self._apply(Restore(3, index))
        self._extend(index, 1)

    @precondition(lambda self: self._crowded())
    @rule(order=far.orders, tokens=far.row_tokens, times=draw.batch_decodes)
    def gather_and_go_on(self, order: tuple[int, ...], tokens: tuple[int, ...], times: int) -> None:
        """A crowd in some order, whole or in part: who is not named leaves, who was out joins behind."""
        self._gather(order)
        self._go_on(tokens, times)

    @precondition(lambda self: self._crowded() and Capability.FRONT_TRIM in self.target.capabilities)
    @rule(which=far.anyone, n=draw.trim_counts, keep=draw.sinks, tokens=far.row_tokens)
    def trim_one_of_many(self, which: int, n: int, keep: int, tokens: tuple[int, ...]) -> None:
        if rows := self._crowd():
            self._apply(TrimFront(n, keep, rows[which % len(rows)]))
            self._go_on(tokens, 1)

    @precondition(lambda self: self._crowded() and Capability.ROLLBACK in self.target.capabilities)
    @rule(which=far.anyone, n=draw.rollback_counts, tokens=far.row_tokens)
    def roll_back_one_of_many(self, which: int, n: int, tokens: tuple[int, ...]) -> None:
        if rows := self._crowd():
            self._apply(Rollback(n, rows[which % len(rows)]))
            self._go_on(tokens, 1)

    @precondition(lambda self: self._crowded())
    @rule(gone=far.anyone, other=far.anyone, times=draw.decode_times)
    def two_leave_and_come_back(self, gone: int, other: int, times: int) -> None:
        if not (rows := self._crowd()):
            return
        out = {rows[gone % len(rows)], rows[other % len(rows)]}
        stay = tuple(row for row in rows if row not in out)
        self._apply(Batch(stay))
        self._apply(BatchDecode(times))
        self._apply(Batch((*stay, *sorted(out))))
        self._apply(BatchDecode(2))

    def _wide(self) -> bool:
        """Are the caches such as small programs would not fill?"""
        return bool(getattr(self.target, "far", False))

    def _long(self) -> int:
        """The longest sequence. It is the first one, unless that was cut."""
        owners: Sequence[Owner] = self.judge.run.owners if self.judge is not None else ()
        return max(range(len(owners)), key=lambda index: (self._ledger(index).live_len, -index), default=0)

    def _all_but(self, keys: int) -> int:
        """Tokens that a front trim of the first sequence drops, so that so many are left."""
        return max(0, self._ledger(0).live_len - keys)

    def _crowded(self) -> bool:
        return self._can_batch() and self.judge is not None and len(self.judge.run.owners) >= CROWD

    def _crowd(self) -> tuple[int, ...]:
        """The rows of the batch, who are four at least; none where the program has stopped before they could gather."""
        if len(self._batch()) < CROWD:
            self._gather(tuple(range(len(self.judge.run.owners) if self.judge is not None else 0)))
        return self._batch()


class FarImageMachine(FarMachine, ImageMachine):
    """The same behind a prompt with images."""

    @initialize(shape=far.shapes, first=draw.image_prefills(), frame=draw.frames)
    def begin(self, shape: far.Shape, first: Prefill, frame: draw.Frame) -> None:
        self._begin_far(shape, frame, first, shape.tokens)


class FarServingMachine(FarMachine, ServingMachine):
    """The same of targets that decide themselves who goes forward with whom."""

    @initialize(shape=far.shapes, frame=draw.frames)
    def begin(self, shape: far.Shape, frame: draw.Frame) -> None:
        self._begin_far(shape, frame, Prefill(shape.tokens[0]), shape.tokens[1:])
