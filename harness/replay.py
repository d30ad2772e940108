"""Replays a trace: does the program still break the property that it broke when it was recorded?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from harness.findings import Finding, FindingError
from harness.judge import judge_program
from harness.judging import Property
from harness.tally import Tally
from harness.target import Target
from harness.trace import Trace, TraceError


class Outcome(StrEnum):
    """FIXED: the recorded property holds and so do all others. FAILED: one is broken, the recorded one or another."""

    FIXED = "FIXED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Replay:
    """What a replay came to. ``same``: it is the recorded property that broke."""

    outcome: Outcome
    finding: Finding | None
    same: bool

    def text(self, trace: Trace) -> str:
        """One line of verdict, then the failure."""
        recorded = trace.finding["property"] if trace.finding else None
        if self.finding is None:
            if recorded is None:
                return f"{self.outcome}   the trace records no finding, and there is none now"
            return f"{self.outcome}   {recorded} holds now, and so does every other property"
        if self.same:
            return f"{self.outcome}  {recorded} is still broken\n{self.finding.text()}"
        return f"{self.outcome}  {recorded or 'nothing'} was recorded, now another is broken\n{self.finding.text()}"


def replay(trace: Trace, target: Target, properties: Sequence[Property]) -> Replay:
    """Run the program of a trace again, first under the recorded property, then under all of them.

    Raises TraceError if the recorded property is not among ``properties``, or cannot be judged on this target: FIXED
    would then mean nothing. The same when no step of the replay was decisive.
    """
    recorded = trace.finding["property"] if trace.finding else None
    known = {prop.id for prop in properties}
    if recorded is not None and recorded not in known:
        raise TraceError(f"the trace names the property {recorded!r:.60}, which this harness does not have")
    for prop in properties:
        if prop.id == recorded and (missing := prop.needs - target.capabilities):
            raise TraceError(f"{recorded} cannot be judged here, the target lacks: {', '.join(sorted(missing))}")
    chosen = [prop for prop in properties if prop.id == recorded]
    tally = Tally()
    for judges in (chosen, properties):
        if not judges:
            continue
        try:
            judge_program(target, trace.program, judges, tally)
        except FindingError as error:
            return Replay(Outcome.FAILED, error.finding, error.finding.property_id == recorded)
    for prop in chosen:
        if not tally.properties[prop.id].decisive_steps:
            raise TraceError(
                f"{recorded} is not broken, but no step of the replay was decisive (it needs {prop.decisive_when}), "
                f"so nothing says that it is fixed"
            )
    return Replay(Outcome.FIXED, None, False)
