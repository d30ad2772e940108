"""Completion: nothing that the ledger allows may raise, and what comes out are numbers."""

from __future__ import annotations

import numpy as np

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property
from harness.steps import Step


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


class EveryForwardGivesFiniteLogits(Property):
    id = "every_forward_gives_finite_logits"
    sentence = (
        "Every forward gives one row of finite logits per token (a query from which -inf hides every key gives NaN)."
    )
    decisive_when = "a forward behind keys: only then can a query be left without any"

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            logits = forward.seen.logits
            if logits is None:
                continue
            steps += 1
            decisive += len(forward.append.held) > 0
            expected = (len(forward.append.positions), run.target.vocab_size)
            message = None
            if logits.shape != expected:
                message = f"the logits have the shape {list(logits.shape)}, expected {list(expected)}"
            elif not np.isfinite(logits).all():
                token, entry = (int(i) for i in np.argwhere(~np.isfinite(logits))[0])
                message = (
                    f"the logits of the token at position {forward.append.positions[token]} are not finite: entry "
                    f"{entry} is {logits[token, entry]:g} ({len(forward.append.held)} keys held)"
                )
            if message is not None:
                violation = Violation(step.index, f"{step.operation.text()}: {message}")
                return Judgement(steps, decisive + 1, violation=violation)
        return Judgement(steps, decisive)
