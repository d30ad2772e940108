"""Completion: nothing that the ledger allows may raise."""

from __future__ import annotations

from harness.execution import Execution, Step
from harness.findings import Violation
from harness.judging import Judgement, Property


class EveryOperationCompletes(Property):
    id = "every_operation_completes"
    sentence = "No operation that the ledger allows raises an error (across an FFI boundary it would kill the server)."
    decisive_when = "always: any operation can raise"

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        if step.error is None:
            return Judgement(1, 1)
        first = " ".join(step.error.split())
        message = f"{step.operation.text()} raised {first} ({step.before})"
        return Judgement(1, 1, violation=Violation(step.index, message))
