"""Replays a trace: does the program still break the property that it broke when it was recorded?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from harness.capability import needs
from harness.execution import Execution
from harness.findings import Finding, FindingError
from harness.images import check_size
from harness.judge import judge_program
from harness.judging import Property, attention_calls
from harness.media import MediaError
from harness.operations import Prefill
from harness.steps import Step
from harness.tally import Tally
from harness.target import Capability, Target
from harness.trace import Trace, TraceError
from harness.words import in_words


class Outcome(StrEnum):
    """FIXED: the recorded property holds and so do all others. FAILED: one is broken, the recorded one or another."""

    FIXED = "FIXED"
    FAILED = "FAILED"


@dataclass(frozen=True)
class Replay:
    """What a replay came to. ``same``: it is the recorded property that broke; ``target``: its full name; ``drawn``:
    its configuration in words, if that was drawn."""

    outcome: Outcome
    finding: Finding | None
    same: bool
    target: str
    drawn: str | None = None

    def text(self, trace: Trace) -> str:
        """One line of verdict, then the failure."""
        recorded = trace.finding["property"] if trace.finding else None
        if self.finding is None:
            if recorded is None:
                said = f"{self.outcome}   the trace records no finding, and there is none now"
            else:
                said = f"{self.outcome}   {recorded} holds now, and so does every other property"
            return "\n".join([said, f"      program   {trace.program}", *self._target()])
        if self.same:
            return f"{self.outcome}  {recorded} is still broken\n{self._detail()}"
        return f"{self.outcome}  {recorded or 'nothing'} was recorded, now another is broken\n{self._detail()}"

    def _detail(self) -> str:
        assert self.finding is not None
        return "\n".join([*self.finding.text().splitlines(), *self._target()])

    def _target(self) -> list[str]:
        lines = [f"      target    {self.target}"]
        return lines if self.drawn is None else [*lines, f"      drawn     {self.drawn}"]


def replay(trace: Trace, target: Target, properties: Sequence[Property]) -> Replay:
    """Run the program of a trace again, first under the recorded property, then under all of them.

    Raises TraceError if the recorded property is not among ``properties``, or cannot be judged on this target: FIXED
    would then mean nothing. The same when the recorded steps are of another program, when nothing was judged where
    the recorded property broke, or when the finding did not come back when it was recorded.
    """
    if trace.program.has_media and target.images is None:
        raise TraceError(f"its program has images, but {target.identity.full_name} takes none")
    try:
        for operation in trace.program.operations:
            if isinstance(operation, Prefill) and target.images is not None:
                check_size(operation.media, target.images)
    except MediaError as error:
        raise TraceError(f"{operation.text()}: {error}") from error
    told = [step.get("operation") for step in trace.steps]
    if trace.finding is not None and told != [operation.text() for operation in trace.program.operations[: len(told)]]:
        raise TraceError(
            "its steps are not those of its program, so its finding says nothing about it; to run another program, set "
            "'finding' to null and 'steps' to []"
        )
    if unable := needs(trace.program) - target.capabilities:
        raise TraceError(f"{target.identity.full_name} cannot run its program, it lacks: {', '.join(sorted(unable))}")
    recorded = trace.finding["property"] if trace.finding else None
    known = {prop.id for prop in properties}
    if recorded is not None and recorded not in known:
        raise TraceError(f"the trace names the property {recorded!r:.60}, which this harness does not have")
    for prop in properties:
        if prop.id == recorded and (missing := prop.needs - target.capabilities):
            raise TraceError(f"{recorded} cannot be judged here, the target lacks: {', '.join(sorted(missing))}")
    chosen = [prop for prop in properties if prop.id == recorded]
    tally = Tally()
    judged: Execution
    name, drawn = target.identity.full_name, target.identity.drawn
    words = None if drawn is None else in_words(drawn["config"] | drawn["options"])
    for judges in (chosen, properties):
        if not judges:
            continue
        try:
            run = judge_program(target, trace.program, judges, tally).run
        except FindingError as error:
            return Replay(Outcome.FAILED, error.finding, error.finding.property_id == recorded, name, words)
        if judges is chosen:
            judged = run
    if chosen and trace.finding is not None:
        _insist(chosen[0], properties, judged, trace.finding, tally)
    return Replay(Outcome.FIXED, None, False, name, words)


def _insist(
    prop: Property, properties: Sequence[Property], run: Execution, finding: dict[str, Any], tally: Tally
) -> None:
    """FIXED must mean something. TraceError where this replay could not have shown the finding."""
    if not finding["reproducible"]:
        raise TraceError(
            f"{prop.id} is not broken, but the finding did not come back in a fresh model when it was recorded either: "
            f"it depends on what ran before, and no replay can say that it is fixed"
        )
    counted = tally.properties.get(prop.id)
    looked = 0 if counted is None else counted.steps
    if (step := finding["step"]) is not None and step < len(run.steps):
        there = prop.judge_step(run, run.steps[step])
        looked = looked if there is None else there.steps
        if not looked and Capability.ATTENTION in prop.needs and _masks_are_not_needed(run, run.steps[step]):
            # Who compares what is shown has looked at it; a mask that is none has no width to compare.
            looked = sum(_steps(other, run, step) for other in properties if prop.needs <= other.needs)
    if not looked:
        raise TraceError(
            f"{prop.id} is not broken, but it found nothing to judge where it broke (the calls are no longer seen, or "
            f"no mask is explicit any more), so nothing says that it is fixed"
        )


def _masks_are_not_needed(run: Execution, step: Step) -> bool:
    """Were all its forwards of one token, whose attention was seen?"""
    return all(
        len(forward.append.positions) == 1 and any(True for _ in attention_calls(run, forward))
        for forward in step.forwards
    )


def _steps(prop: Property, run: Execution, step: int) -> int:
    """How much of this step the property looks at."""
    judgement = prop.judge_step(run, run.steps[step])
    return 0 if judgement is None else judgement.steps
