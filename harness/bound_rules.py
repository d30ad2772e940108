"""Rules of the state machine that bound a sequence, at the points where a server does."""

from __future__ import annotations

from hypothesis.stateful import rule

from harness import strategies as draw
from harness.ledger import SINKS
from harness.operations import Chunk, Decode, EnforceMaxKvSize, Verify
from harness.program_rules import ProgramRules, able
from harness.target import Capability


class BoundRules(ProgramRules):
    """``EnforceMaxKvSize`` alone, behind the chunks of a prefill, and in front of decodes and verify rounds."""

    @able(Capability.ENFORCE)
    @rule(sequence=draw.sequences, excess=draw.excesses, bound=draw.bounds)
    def enforce(self, sequence: int, excess: int, bound: draw.Bound) -> None:
        index = self._filled(sequence, bound)
        self._enforce(index, self._limit(index, excess, bound), bound)

    @able(Capability.ENFORCE)
    @rule(sequence=draw.sequences, tokens=draw.chunk_sizes, excess=draw.excesses, bound=draw.bounds)
    def bounded_prefill(self, sequence: int, tokens: int, excess: int, bound: draw.Bound) -> None:
        """A chunked prefill under a bound, as a server does it: chunk, enforce, chunk, enforce."""
        index = self._sequence(sequence)
        limit = self._limit(index, excess, bound)
        for _ in range(2):
            self._apply(Chunk(tokens, index))
            self._enforce(index, limit, bound)

    @able(Capability.ENFORCE)
    @rule(
        sequence=draw.sequences,
        excess=draw.excesses,
        bound=draw.bounds,
        rounds=draw.bounded_rounds,
        drafts=draw.drafts_or_none,
        accept=draw.accepts,
    )
    def bounded_decode(
        self, sequence: int, excess: int, bound: draw.Bound, rounds: int, drafts: int, accept: int
    ) -> None:
        """A server that has reached its bound: enforce, then one token or a verify round, again and again."""
        index = self._filled(sequence, bound)
        limit = self._limit(index, excess, bound)
        verifies = drafts and Capability.ROLLBACK in self.target.capabilities
        for _ in range(rounds):
            self._enforce(index, limit, bound)
            self._apply(Verify(drafts, min(accept, drafts), index) if verifies else Decode(1, index))

    def _filled(self, sequence: int, bound: draw.Bound) -> int:
        """Which one is meant. A context shift finds more there than its floor of four: of less it can keep nothing, and
        half of everything is then half of the rest."""
        index = self._sequence(sequence)
        if bound[0] == "shift" and self._ledger(index).live_len < 2 * SINKS:
            self._extend(index, 2 * SINKS)
        return index

    def _limit(self, index: int, excess: int, bound: draw.Bound) -> int:
        """A bound relative to what the next token would see, which is what a bound is compared with: most absolute ones
        would do nothing, and a ring shows no more than its window, however long the sequence is.

        A context shift comes when its bound is just met, for it makes more room than it must. A large excess would hide
        how much more.
        """
        seen = self._ledger(index).seen_len
        if bound[0] == "shift" and excess < draw.FAR:
            excess = min(excess, max(1, seen // 3))
        return max(1, seen - excess)

    def _enforce(self, index: int, limit: int, bound: draw.Bound) -> None:
        self._apply(EnforceMaxKvSize(limit, *bound, sequence=index))
