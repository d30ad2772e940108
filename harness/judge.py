"""Runs a program one operation at a time and lets every property judge what happened.

The state machine, the replay and the pins all use it, so a trace is judged exactly as the program was when it was
found.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from harness.execution import Execution
from harness.findings import Finding, report
from harness.judging import Evidence, Judgement, Property
from harness.operations import Operation, Owner, Program
from harness.steps import Step
from harness.target import Target
from harness.turns import Turns


class Listener(Protocol):
    """Told everything that was measured (see ``harness.tally``)."""

    def on_step(self, run: Execution, step: Step) -> None: ...

    def on_judgement(self, prop: Property, judgement: Judgement) -> None: ...

    def on_finding(self, finding: Finding) -> None: ...

    def on_end(self, evidence: Evidence) -> None: ...


class Judge:
    """One program on one target under several properties.

    A violation raises a FindingError (from ``findings.report``) unless its property is in ``muted``: those are still
    counted, so that a campaign can look for a second bug behind one that it has already found. ``turns``: which
    programs are judged by properties that run them again; all, if not given.
    """

    def __init__(
        self,
        target: Target,
        owners: tuple[Owner, ...],
        properties: Sequence[Property],
        listener: Listener | None = None,
        muted: Collection[str] = (),
        turns: Turns | None = None,
    ) -> None:
        self.run = Execution(target, owners)
        self._properties = [prop for prop in properties if prop.needs <= target.capabilities]
        self._listener = listener
        self._muted = muted
        self._turns = turns or Turns()
        self._ended = False

    @property
    def stopped(self) -> bool:
        """No more operations: the run stopped, or a finding was reported, or the program was ended."""
        return self._ended or self.run.stopped

    def apply(self, operation: Operation) -> Step:
        """Apply and judge one operation."""
        try:
            step = self.run.apply(operation)
        except BaseException:  # Ctrl-C: half of it was done, so that nothing behind it could be judged
            self._ended = True
            raise
        if self._listener is not None:
            self._listener.on_step(self.run, step)
        for prop in self._properties:
            self._take(prop, prop.judge_step(self.run, step))
        return step

    def end(self) -> None:
        """Judge the run as a whole; does nothing after a finding or the second time."""
        if self._ended:
            return
        self._ended = True
        evidence = Evidence(self.run)
        try:
            for prop in self._properties:
                if prop.runs_again and not (prop.may_decide(evidence) and self._turns.has(prop.id, self.run.program)):
                    continue
                judgement = prop.judge_run(evidence)
                if prop.runs_again and judgement is not None:
                    self._turns.took(prop.id, judgement.decisive)
                self._take(prop, judgement)
        finally:
            if self._listener is not None:
                self._listener.on_end(evidence)

    def _take(self, prop: Property, judgement: Judgement | None) -> None:
        if judgement is None:
            return
        if self._listener is not None:
            self._listener.on_judgement(prop, judgement)
        if judgement.violation is not None and prop.id not in self._muted:
            finding = Finding(prop.id, self.run.target.identity.name, judgement.violation, self.run.program)
            if self._listener is not None:
                self._listener.on_finding(finding)
            if not self._ended:  # found in a step: the run ends here
                self._ended = True
                if self._listener is not None:
                    self._listener.on_end(Evidence(self.run))
            report(finding)


def judge_program(
    target: Target, program: Program, properties: Sequence[Property], listener: Listener | None = None
) -> Judge:
    """Run and judge a whole program; raises FindingError at the first violation, returns the ended Judge otherwise."""
    judge = Judge(target, program.owners, properties, listener)
    for operation in program.operations:
        if judge.stopped:
            break
        judge.apply(operation)
    judge.end()
    return judge
