"""Rules of the state machine that draw operations on a batch."""

from __future__ import annotations

from hypothesis.stateful import precondition, rule

from harness import strategies as draw
from harness.operations import Batch, BatchDecode, BatchForward, EnforceMaxKvSize, Rollback, TrimFront
from harness.program_rules import ProgramRules
from harness.target import Capability


class BatchRules(ProgramRules):
    """Every rule ends with forwards: a chunk of all rows, ragged or not, and in half of the cases a few tokens one by
    one."""

    @precondition(lambda self: self._can_batch())
    @rule(
        order=draw.batch_orders,
        tokens=draw.row_tokens,
        times=draw.batch_decodes,
        deep=draw.deep,
        quantised=draw.quantised_first,
        storages=draw.storages,
    )
    def batch_and_go_on(
        self,
        order: tuple[int, ...],
        tokens: tuple[int, ...],
        times: int,
        deep: draw.Deep,
        quantised: bool,
        storages: draw.Storages,
    ) -> None:
        """Some sequences, of whatever lengths they have, join, stay or leave, and the batch goes forward."""
        for row in self._as_far_as_there(Batch(order)).rows:
            self._sequence(row, deep)
            if quantised and Capability.INT8 in self.target.capabilities:
                self._quantise(row, storages)
        self._gather(order)
        self._go_on(tokens, times)

    @precondition(lambda self: self._can_batch())
    @rule(order=draw.batch_orders, tokens=draw.row_tokens, times=draw.batch_decodes)
    def batch_goes_on(self, order: tuple[int, ...], tokens: tuple[int, ...], times: int) -> None:
        self._gather_unless(order)
        self._go_on(tokens, times)

    @precondition(lambda self: self._can_batch() and Capability.FRONT_TRIM in self.target.capabilities)
    @rule(
        which=draw.sequences,
        n=draw.trim_counts,
        keep=draw.sinks,
        tokens=draw.row_tokens,
        times=draw.batch_decodes,
        order=draw.batch_orders,
    )
    def trim_a_row_and_go_on(
        self, which: int, n: int, keep: int, tokens: tuple[int, ...], times: int, order: tuple[int, ...]
    ) -> None:
        self._gather_unless(order)
        if rows := self._batch():
            self._apply(TrimFront(n, keep, rows[which % len(rows)]))
        self._go_on(tokens, times)

    @precondition(lambda self: self._can_batch() and Capability.ROLLBACK in self.target.capabilities)
    @rule(
        which=draw.sequences,
        n=draw.rollback_counts,
        tokens=draw.row_tokens,
        times=draw.batch_decodes,
        order=draw.batch_orders,
    )
    def roll_back_a_row_and_go_on(
        self, which: int, n: int, tokens: tuple[int, ...], times: int, order: tuple[int, ...]
    ) -> None:
        self._gather_unless(order)
        if rows := self._batch():
            self._apply(Rollback(n, rows[which % len(rows)]))
        self._go_on(tokens, times)

    @precondition(lambda self: self._can_batch() and Capability.ROLLBACK in self.target.capabilities)
    @rule(accept=draw.accepts, tokens=draw.row_tokens, times=draw.batch_decodes, order=draw.batch_orders)
    def speculate_in_a_batch(self, accept: int, tokens: tuple[int, ...], times: int, order: tuple[int, ...]) -> None:
        """Drafts for every row, behind tokens that came one by one. Rows accept different numbers of them; some go back
        up to two tokens further, which those that have forgotten what stood there must refuse."""
        self._gather_unless(order)
        self._apply(BatchDecode(1 + times))
        drafts = BatchForward(tokens)
        self._apply(drafts)
        rows = self._batch()
        for number, (row, drafted) in enumerate(zip(rows, drafts.of(len(rows)), strict=True)):
            self._apply(Rollback(max(1, drafted + 2 - (accept + number) % 7), row))
        self._apply(BatchDecode(1))

    @precondition(lambda self: self._can_batch() and Capability.ENFORCE in self.target.capabilities)
    @rule(
        excess=draw.excesses,
        bound=draw.bounds,
        tokens=draw.row_tokens,
        order=draw.batch_orders,
    )
    def bound_a_batch_and_go_on(
        self, excess: int, bound: draw.Bound, tokens: tuple[int, ...], order: tuple[int, ...]
    ) -> None:
        """Continuous batching under a bound: a chunk, then every row is bounded before each decode. The bound is the
        server's, the same for all: longer rows lose more, and short ones nothing."""
        self._gather_unless(order)
        self._apply(BatchForward(tokens))
        held = [self._ledger(row).seen_len for row in self._batch()]
        limit = max(1, max(held, default=1) - excess)
        for _ in range(2):
            for row in self._batch():
                self._apply(EnforceMaxKvSize(limit, *bound, sequence=row))
            self._apply(BatchDecode(1))

    def _go_on(self, tokens: tuple[int, ...], times: int) -> None:
        self._apply(BatchForward(tokens))
        if times:
            self._apply(BatchDecode(times))

    def _can_batch(self) -> bool:
        """Is there anything to batch, and can the target?"""
        return Capability.BATCH in self.target.capabilities and self._several()

    def _batch(self) -> tuple[int, ...]:
        return () if self.judge is None else self.judge.run.batch

    def _gather_unless(self, order: tuple[int, ...]) -> None:
        """Only where there are no two rows already: a batch that lives on is as good, and older."""
        if len(self._batch()) < 2:
            self._gather(order)

    def _gather(self, order: tuple[int, ...]) -> None:
        self._apply(self._as_far_as_there(Batch(order)))
