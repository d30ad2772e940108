"""Memory: what a trim or a reset gives back."""

from __future__ import annotations

from typing import ClassVar

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property
from harness.operations import EnforceMaxKvSize, Reset, TrimFront
from harness.steps import Step
from harness.target import Capability

GROWTH = 256  # slots by which a cache may be larger than what it holds


class MemoryIsGivenBack(Property):
    id = "memory_is_given_back"
    sentence = (
        "Behind a front trim a cache holds buffers for its live keys and at most 256 slots more, behind a reset none."
    )
    decisive_when = "before it the cache held more than it may hold afterwards"
    needs: ClassVar = frozenset({Capability.BYTES})

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        """Says nothing of rollbacks: what they drop is about to be written again."""
        operation, index = step.operation, step.operation.index
        reset = isinstance(operation, Reset) and step.effective
        trimmed = isinstance(operation, (TrimFront, EnforceMaxKvSize)) and bool(step.expected_removed)
        if not (reset or trimmed) or not step.told or not step.index:
            return None
        before, after = run.steps[step.index - 1].told[index].memory, step.told[index].memory
        # A batch holds as many slots for every row as its longest has keys.
        rows = step.rows if index in step.rows else ()
        live = max((len(step.told[row].held) for row in rows), default=step.after.live_len)
        decisive = False
        for layer, was, now in zip(run.target.attention_layers, before, after, strict=False):
            allowed = 0 if reset else (live + GROWTH) * was.per_slot
            if now.held > allowed:
                why = "a reset leaves nothing" if reset else f"{live} keys and {GROWTH} slots of {was.per_slot} bytes"
                message = (
                    f"layer {layer}: the cache holds {now.held} bytes after {operation.text()}, allowed are {allowed} "
                    f"({why}; it held {was.held} before)"
                )
                return Judgement(1, 1, violation=Violation(step.index, message))
            decisive |= was.held > allowed
        return Judgement(1, int(decisive))
