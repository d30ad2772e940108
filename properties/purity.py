"""Purity: what an operation is given, and what a cache has given out, is nobody's to write into."""

from __future__ import annotations

from typing import ClassVar

from harness.findings import Violation
from harness.judging import Evidence, Judgement, Property
from harness.target import ArgumentChange, Capability


class OperationsArePure(Property):
    id = "operations_are_pure"
    sentence = (
        "No operation writes into an array that it was given (tokens, images, masks, positions and their tables), or "
        "that a cache gave out before (keys, values, offsets)."
    )
    decisive_when = (
        "a forward, which could have written; or any change to a sequence whose last forward's arrays are held"
    )
    needs: ClassVar = frozenset({Capability.ARGUMENTS})
    runs_again = True

    def judge_run(self, evidence: Evidence) -> Judgement:
        run = evidence.repeat
        looked = decisive = 0
        last: frozenset[int] = frozenset()  # the sequences of the last forward
        for step in run.steps:
            seen = step.arguments
            if seen is None:
                continue
            changes = bool(step.forwards or step.expected_removed or step.effective)
            looked += seen.given + seen.held
            decisive += seen.given + (seen.held if changes and last & step.acted else 0)
            if seen.changed:
                message = _message(run.target.attention_layers, seen.changed[0])
                return Judgement(
                    looked, max(decisive, 1), violation=Violation(step.index, f"{step.operation.text()}: {message}")
                )
            if step.forwards:
                last = step.acted
        return Judgement(looked, decisive)


def _message(layers: tuple[int, ...], change: ArgumentChange) -> str:
    layer = "" if change.call is None else f"layer {layers[change.call]}: "
    where = f" (entry {list(change.index)})" if change.index else ""
    return f"{layer}{change.what} changed in place{where}: was {change.was}, is {change.now}"
