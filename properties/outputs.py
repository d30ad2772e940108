"""Outputs: the logits of every forward are those of one forward without a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np

from harness.comparison import allowed, recut_tolerance
from harness.findings import Violation
from harness.judging import Evidence, Judgement, Property, recut_limit
from harness.oracle import Expected
from harness.steps import ForwardStep, Step
from harness.target import Capability
from properties.reproducibility import UNREPEATED, repeats_itself

_DECISIVE = (
    "a forward from whose sequence keys were trimmed or rolled back before, or a chunk (l > 1) behind cached keys; and "
    "no near tie of experts, no rounding of a quantised cache that could go either way"
)


class _OutputsEqual(Property, ABC):
    """Every token of a run against what is expected of it."""

    decisive_when = _DECISIVE
    feels: ClassVar = frozenset({"context", "trims"})
    name: ClassVar[str]

    @abstractmethod
    def expected(self, evidence: Evidence) -> Expected | str | None:
        """What the witness says, the error that it raised, or None where there is nothing to ask."""

    def judge_run(self, evidence: Evidence) -> Judgement:
        expected = self.expected(evidence)
        if expected is None or evidence.history is None:
            return Judgement()
        if isinstance(expected, str):
            return Judgement(1, 1, violation=Violation(None, f"{self.name} raised {' '.join(expected.split())}"))
        limits, strict = allowed(
            expected.dtype,
            evidence.history.positions[evidence.history.processed],
            _smaller(evidence, expected, "choice_gap"),
            _smaller(evidence, expected, "rounding_gap"),
            max(recut_tolerance("int8"), recut_limit(evidence.run)),  # the least that rounding can do
        )
        unit = float(expected.logits.std()) or 1.0
        looked = decisive = 0
        worst: float | None = None
        for step, which, forward in _forwards(evidence):
            logits, numbers = forward.seen.logits, forward.append.numbers
            rows = slice(numbers.start, numbers.stop)
            if logits is None or logits.shape != expected.logits[rows].shape:
                continue  # every_forward_gives_finite_logits says what is missing
            gaps = np.abs(logits - expected.logits[rows]) / unit
            each, limit, judged = gaps.max(axis=-1), limits[rows], strict[rows]
            looked += bool(np.isfinite(limit).any())
            decisive += bool(judged.any()) and _decides(forward)
            if judged.any():
                worst = float(np.max(each[judged], initial=worst or 0.0))
            wrong = np.flatnonzero(~(each <= limit))  # a nan is no number that anything allows
            if len(wrong):
                if not repeats_itself(evidence):
                    return Judgement(looked, inconclusive=UNREPEATED)
                message = self._message(step, which, forward, int(wrong[0]), gaps, limit, expected.logits[rows])
                return Judgement(looked, decisive + 1, worst, Violation(step.index, message))
        return Judgement(looked, decisive, worst)

    def _message(
        self, step: Step, which: int, forward: ForwardStep, token: int, gaps: Any, limit: Any, expected: Any
    ) -> str:
        append = forward.append
        entry = int(np.where(np.isnan(gaps[token]), np.inf, gaps[token]).argmax())
        assert forward.seen.logits is not None
        return (
            f"{step.operation.text()}, forward {which}: the logits of the token at position "
            f"{append.positions[token]} differ at entry {entry}: {forward.seen.logits[token, entry]:.9g} from the "
            f"target, {expected[token, entry]:.9g} from {self.name} (largest difference {gaps[token, entry]:.3g} of "
            f"the logits' deviation, {limit[token]:.1g} allowed; {len(append.held)} keys held, chunk of "
            f"{len(append.positions)})"
        )


class OutputsEqualTheWitness(_OutputsEqual):
    id = "outputs_equal_the_witness"
    sentence = (
        "The logits of every forward are those of an independent float64 implementation, which processes all tokens at "
        "once, without a cache, and shows each what the ledger held for it."
    )
    needs: ClassVar = frozenset({Capability.WITNESS})
    name = "the float64 witness"

    def expected(self, evidence: Evidence) -> Expected | None:
        return evidence.witness


class OutputsEqualTheCacheFreeForward(_OutputsEqual):
    id = "outputs_equal_the_cache_free_forward"
    sentence = (
        "The logits of every forward are those of the target's own model, called once over all tokens, without a "
        "cache, with a mask that shows each what the ledger held for it."
    )
    needs: ClassVar = frozenset({Capability.CACHE_FREE})
    name = "the target's forward without a cache"

    def expected(self, evidence: Evidence) -> Expected | str | None:
        return evidence.cache_free


def _forwards(evidence: Evidence) -> Iterator[tuple[Step, int, ForwardStep]]:
    for step in evidence.run.steps:
        for which, forward in enumerate(step.forwards):
            yield step, which, forward


def _decides(forward: ForwardStep) -> bool:
    append = forward.append
    return forward.removed or append.padding + append.behind > 0 or (len(append.positions) > 1 and len(append.held) > 0)


def _smaller(evidence: Evidence, expected: Expected, name: str) -> np.ndarray[Any, Any] | None:
    """The smaller of the gaps that the two witnesses know of: a tie is one whoever sees it."""
    known = [getattr(said, name) for said in (expected, evidence.witness) if isinstance(said, Expected)]
    gaps = [gap for gap in known if gap is not None]
    return None if not gaps else np.minimum.reduce(gaps)
