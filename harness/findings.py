"""Verdicts and findings. This is the one module that raises a finding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NoReturn

from harness.operations import Program


class Verdict(StrEnum):
    """What a run says of one property (or, as the worst of them, of one family)."""

    PASS = "PASS"
    FAIL = "FAIL"
    VACUOUS = "VACUOUS"  # no decisive step: proves nothing, fails a strict run
    NOT_APPLICABLE = "NOT APPLICABLE"  # the target lacks a capability that the property needs
    LIMITATION = "LIMITATION"  # cannot run here (device, dtype), with a reason
    KNOWN = "KNOWN"  # recorded upstream bug that still fails
    INCONCLUSIVE = "INCONCLUSIVE"  # the A/A control disagrees with itself, so A/B says nothing


NOT_AGAIN = "      again     it did not come back in a target made new: it depends on more than the program"
"""What is said of a finding that is not reproducible, as it is printed."""


@dataclass(frozen=True)
class Violation:
    """One broken sentence: the step (index into the program's operations; None for the whole run) and one line that
    says what was seen and what was expected, with layer, step and numbers."""

    step: int | None
    message: str


@dataclass(frozen=True)
class Finding:
    """A violation of a property by a program on a target; everything that a reader needs to replay it."""

    property_id: str
    target: str
    violation: Violation
    program: Program
    reproducible: bool = True  # it comes back in a target made new; else a replay cannot judge it

    @property
    def message(self) -> str:
        """The line of the violation; which operation it is about, where that is not the last one, and might be any of
        several that look the same."""
        step, count = self.violation.step, len(self.program.operations)
        if step is None or step + 1 >= count:
            return self.violation.message
        return f"{self.violation.message} (operation {step + 1} of {count})"

    def text(self, replay: str | None = None, known: bool = False) -> str:
        """The failure as it is printed everywhere. ``known``: it is recorded of the release, and no news."""
        lines = [
            f"{'KNOWN' if known else 'FAIL'}  {self.property_id}   {self.target}",
            f"      {self.message}",
            f"      program   {self.program}",
            *([] if self.reproducible else [NOT_AGAIN]),
        ]
        if replay:
            lines.append(f"      replay    {replay}")
        return "\n".join(lines)


class FindingError(AssertionError):
    """Carries a Finding through Hypothesis."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text())
        self.finding = finding


def report(finding: Finding) -> NoReturn:
    """The one raise site: Hypothesis tells bugs apart by where they are raised, and one place makes it shrink one."""
    raise FindingError(finding)
