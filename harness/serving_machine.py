"""The state machine of targets that decide themselves who goes forward with whom, as servers do."""

from __future__ import annotations

from hypothesis.stateful import initialize, precondition, rule

from harness import strategies as draw
from harness.machine import ProgramMachine
from harness.operations import Batch, BatchDecode, BatchForward, Owner, Prefill


class ServingMachine(ProgramMachine):
    """The same with several sequences, which more often come and go while others decode. Who gets a chunk is read like
    a prompt, so that a batch whose rows all do shows little of what happens to those that go on."""

    @initialize(
        owners=draw.several_owners,
        tokens=draw.prefill_sizes,
        start=draw.second_starts,
        more=draw.prefill_sizes,
        frame=draw.frames,
    )
    def begin(self, owners: tuple[Owner, ...], tokens: int, start: str, more: int, frame: draw.Frame) -> None:
        self._begin(owners, Prefill(tokens), Prefill(more, 1), start, frame)

    @precondition(lambda self: self._can_batch())
    @rule(order=draw.batch_orders, prompt=draw.chunk_sizes, times=draw.decode_times)
    def come_while_others_decode(self, order: tuple[int, ...], prompt: int, times: int) -> None:
        """Who joins reads a prompt while who stays decodes."""
        before = self._batch()
        self._gather(order)
        if rows := self._batch():
            self._apply(BatchForward(tuple(1 if row in before else prompt for row in rows)))
        self._apply(BatchDecode(times))

    @precondition(lambda self: self._can_batch())
    @rule(order=draw.batch_orders, which=draw.sequences, first=draw.decode_times, times=draw.decode_times)
    def leave_while_others_decode(self, order: tuple[int, ...], which: int, first: int, times: int) -> None:
        self._gather_unless(order)
        self._apply(BatchDecode(first))
        if rows := self._batch():
            gone = rows[which % len(rows)]
            self._apply(Batch(tuple(row for row in rows if row != gone)))
        self._apply(BatchDecode(times))
