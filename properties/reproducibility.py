"""Bytes: the same program twice, and the same untrimmed program under the other mask policy."""

from __future__ import annotations

from typing import ClassVar

from harness.comparison import compare_bytes
from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Evidence, Judgement, Property
from harness.steps import Step
from harness.target import Capability

UNREPEATED = "the target does not repeat itself (same_program_same_bytes)"
OTHER_UNREPEATED = "the target does not repeat itself under the other mask policy"


def repeats_itself(evidence: Evidence) -> bool:
    """Does the control agree, the same program on the same target?"""
    return _compare(evidence.run.steps, evidence.repeat, "", "").violation is None


def unless_noise(evidence: Evidence, judgement: Judgement) -> Judgement:
    """What a comparison found, or that it says nothing: a target that does not repeat itself differs from anything."""
    if judgement.violation is not None and not repeats_itself(evidence):
        return Judgement(inconclusive=UNREPEATED)
    return judgement


class SameProgramSameBytes(Property):
    id = "same_program_same_bytes"
    sentence = "The same program on the same target gives the same logits, byte for byte (the A/A control)."
    decisive_when = "a forward was repeated"
    runs_again = True
    feels: ClassVar = frozenset({"context", "trims"})

    def judge_run(self, evidence: Evidence) -> Judgement:
        return _compare(evidence.run.steps, evidence.repeat, "the first run", "the second run")


class UntrimmedOutputsAreByteIdentical(Property):
    id = "untrimmed_outputs_are_byte_identical"
    sentence = "As long as nothing is trimmed, the live and the offset mask policy give the same logits, byte for byte."
    decisive_when = "an explicit mask was built by both policies in an untrimmed forward"
    needs: ClassVar = frozenset({Capability.COUNTERPART})
    runs_again = True
    feels: ClassVar = frozenset({"context"})

    def judge_run(self, evidence: Evidence) -> Judgement:
        other = evidence.counterpart
        if other is None or not evidence.untrimmed:
            return Judgement()
        steps = [evidence.run.steps[i] for i in evidence.untrimmed]
        mine, theirs = (run.target.identity.policy for run in (evidence.run, other))
        found = _compare(steps, other, f"the {mine} policy", f"the {theirs} policy", masked_only=True)
        raised = any(step.error is not None for step in other.steps)  # which is a finding, even if it was once
        again = evidence.counterpart_again if found.violation is not None and not raised else None
        if again is not None and _compare(other.steps, again, "", "").violation is not None:
            return Judgement(inconclusive=OTHER_UNREPEATED)
        return unless_noise(evidence, found)


def _compare(
    steps: list[Step], other: Execution, left_name: str, right_name: str, masked_only: bool = False
) -> Judgement:
    """Every forward of ``steps`` against its twin in ``other``. Decisive: each, or those where both built a mask."""
    looked = decisive = 0
    for step, twin in zip(steps, other.steps, strict=False):
        for number, (left, right) in enumerate(zip(step.forwards, twin.forwards, strict=False)):
            a, b = left.seen.logits, right.seen.logits
            if (a is None) != (b is None):
                raised, error = (left_name, left) if a is None else (right_name, right)
                message = f"{step.operation.text()}: only {raised} raised {error.seen.error}"
                return Judgement(looked + 1, decisive + 1, violation=Violation(step.index, message))
            if a is None or b is None:
                continue
            looked += 1
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                shapes = f"{a.dtype}{list(a.shape)} under {left_name}, {b.dtype}{list(b.shape)} under {right_name}"
                message = f"{step.operation.text()}, forward {number}: logits of shape {shapes}"
                return Judgement(looked, decisive + 1, violation=Violation(step.index, message))
            difference = compare_bytes(a, b)
            masked = all(any(call.explicit for call in forward.seen.attention) for forward in (left, right))
            decisive += masked or not masked_only
            if not difference.same_bytes:
                token, entry = difference.index or (0, 0)
                position = left.append.positions[token]
                return Judgement(
                    looked,
                    decisive + 1,
                    difference.largest,
                    Violation(
                        step.index,
                        f"{step.operation.text()}, forward {number}: the logits of the token at position {position} "
                        f"differ at entry {entry}: {difference.left:.9g} under {left_name}, {difference.right:.9g} "
                        f"under {right_name} (largest difference {difference.largest:.3g})",
                    ),
                )
    return Judgement(looked, decisive, 0.0 if looked else None)
