"""The same tokens in another way: without rejected drafts, in one forward, one by one."""

from __future__ import annotations

from typing import ClassVar

from harness.comparison import distance
from harness.findings import Violation
from harness.judging import Evidence, Judgement, Property, recut_limit
from harness.steps import ForwardStep
from harness.target import Capability, ForwardObservation
from properties.reproducibility import unless_noise


class RollbackEqualsNeverSpeculated(Property):
    id = "rollback_equals_never_speculated"
    sentence = (
        "Behind a rollback or a verify round everything is as if the tokens that it dropped had never been processed: "
        "the same logits, to rounding."
    )
    decisive_when = "a forward behind tokens that were rolled back and could be left out"
    needs: ClassVar = frozenset({Capability.ROLLBACK, Capability.FRONT_TRIM})
    runs_again = True
    feels: ClassVar = frozenset({"context", "trims"})

    def may_decide(self, evidence: Evidence) -> bool:
        return any(line.behind and line.tokens for line in evidence.without_rejected)

    def judge_run(self, evidence: Evidence) -> Judgement:
        return unless_noise(evidence, self._judge(evidence))

    @staticmethod
    def _judge(evidence: Evidence) -> Judgement:
        lines = evidence.without_rejected
        if not any(line.behind and line.tokens for line in lines):
            return Judgement()
        limit = recut_limit(evidence.run)
        looked = decisive = 0
        worst = 0.0
        for line, twin in zip(lines, evidence.unspeculated.steps, strict=False):
            step, text = line.step, line.step.operation.text()
            if twin.error is not None:
                message = f"{text}: without the tokens rolled back it raised {' '.join(twin.error.split())}"
                return Judgement(looked + 1, decisive + 1, violation=Violation(step.index, message))
            for number, (left, right) in enumerate(zip(line.forwards, twin.forwards, strict=False)):
                looked += 1
                decisive += line.behind
                found = compare_forwards(left, right.seen, limit, "without the tokens rolled back")
                if isinstance(found, str):
                    message = f"{text}, forward {number}: {found}"
                    return Judgement(looked, decisive + (not line.behind), violation=Violation(step.index, message))
                worst = max(worst, found)
        return Judgement(looked, decisive, worst)


class ChunksEqualOneShot(Property):
    id = "chunks_equal_one_shot"
    sentence = (
        "As long as nothing is trimmed, it makes no difference how tokens are cut into forwards: all at once or one by "
        "one, the logits are the same, to rounding."
    )
    decisive_when = "a token of a forward behind keys, processed again in another cut"
    runs_again = True
    feels: ClassVar = frozenset({"context"})

    def judge_run(self, evidence: Evidence) -> Judgement:
        return unless_noise(evidence, self._judge(evidence))

    @staticmethod
    def _judge(evidence: Evidence) -> Judgement:
        if not evidence.relived:
            return Judgement()
        limit = recut_limit(evidence.run)
        looked = decisive = 0
        worst = 0.0
        for life, size, forwards in evidence.relived:
            words = f"in forwards of {size} token{'s' if size > 1 else ''}"
            for number, spot in enumerate(life.spots):
                text = evidence.run.steps[spot.step].operation.text()
                seen = forwards[number // size]
                if seen.error is not None:
                    message = f"{text}: {words} it raised {' '.join(seen.error.split())}"
                    return Judgement(looked + 1, decisive + 1, violation=Violation(spot.step, message))
                found = _compare_rows(spot.forward, spot.row, seen, number % size, limit, words)
                if isinstance(found, str):
                    return Judgement(looked + 1, decisive + 1, violation=Violation(spot.step, f"{text}: {found}"))
                worst = max(worst, found)
                looked += 1
                decisive += bool(spot.forward.append.held)
        return Judgement(looked, decisive, worst if looked else None)


def compare_forwards(left: ForwardStep, right: ForwardObservation, limit: float, words: str) -> float | str:
    """The largest distance of the logits that both have, or what is wrong in words."""
    worst = 0.0
    for row in range(len(right.tokens)):
        found = _compare_rows(left, row, right, row, limit, words)
        if isinstance(found, str):
            return found
        worst = max(worst, found)
    return worst


def _compare_rows(
    left: ForwardStep, row: int, right: ForwardObservation, other_row: int, limit: float, words: str
) -> float | str:
    a, b = left.seen.logits, right.logits
    if a is None or b is None or a.shape[-1:] != b.shape[-1:] or len(a) <= row or len(b) <= other_row:
        return 0.0  # too few logits are a finding of every_forward_gives_finite_logits
    far = distance(a[row], b[other_row])
    if far <= limit:
        return far
    return (
        f"the logits of the token at position {left.append.positions[row]} are {far:.3g} deviations away from those "
        f"{words}; {limit:g} are allowed ({len(left.append.held)} keys held, chunk of {len(left.append.positions)})"
    )
