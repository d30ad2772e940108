"""Batches: a row of one is a sequence like any other."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Evidence, Judgement, Property, recut_limit
from harness.operations import Batch
from harness.steps import AS_KV_HEADS, Step
from harness.target import Capability
from properties.copies import first_change
from properties.reproducibility import unless_noise
from properties.retold import compare_forwards


class BatchesKeepTheirRows(Property):
    id = "batches_keep_their_rows"
    sentence = (
        "Whoever joins a batch, stays in it while others come and go, or leaves it, has the same lengths and, byte for "
        "byte, the same rows as before."
    )
    decisive_when = "sequences with keys joined, left or stayed while others did"
    needs: ClassVar = frozenset({Capability.BATCH, Capability.LENGTHS, Capability.ROWS})

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        """Of an operation that takes its own sequence out of the batch: what it did to the others."""
        if not step.told or not step.index:
            return None
        operation, last = step.operation, run.steps[step.index - 1]
        if not isinstance(operation, Batch) and step.rows == last.rows:
            return None
        about = set() if isinstance(operation, Batch) else {operation.index, getattr(operation, "into", None)}
        known = False
        for sequence, (old, new) in enumerate(zip(last.told, step.told, strict=True)):
            if sequence in about:
                continue
            known |= bool(old.held)
            message = first_change(run.target.attention_layers, old, new)
            if message is not None:
                where = operation.text() + (f" on sequence {operation.index}, out of the batch," if about else "")
                return Judgement(
                    1, 1, violation=Violation(step.index, f"{where} changed sequence {sequence}: {message}")
                )
        return Judgement(1, int(known and step.rows != last.rows))


class BatchRowsEqualSoloRuns(Property):
    id = "batch_rows_equal_solo_runs"
    sentence = (
        "It makes no difference whether a sequence goes forward in a batch or by itself: its logits are the same, to "
        "rounding."
    )
    decisive_when = "a forward of a batch of two or more rows; their number is that of the KV heads, or another"
    needs: ClassVar = frozenset({Capability.BATCH})
    runs_again = True
    feels: ClassVar = frozenset({"context"})

    def may_decide(self, evidence: Evidence) -> bool:
        return any(forward.append.rows > 1 for step in evidence.run.steps for forward in step.forwards)

    def judge_run(self, evidence: Evidence) -> Judgement:
        return unless_noise(evidence, self._judge(evidence))

    @staticmethod
    def _judge(evidence: Evidence) -> Judgement:
        lines = evidence.without_batches
        if not any(line.forwards and line.forwards[0].append.rows > 1 for line in lines):
            return Judgement()
        limit = recut_limit(evidence.run)
        looked = decisive = 0
        worst = 0.0
        kinds: Counter[str] = Counter()
        for line, twin in zip(lines, evidence.solo.steps, strict=False):
            text = line.step.operation.text()
            if twin.error is not None:
                message = f"{text}: by itself, sequence {line.operation.index} raised {' '.join(twin.error.split())}"
                return Judgement(looked + 1, decisive + 1, violation=Violation(line.step.index, message))
            for left, right in zip(line.forwards, twin.forwards, strict=False):
                looked += 1
                decisive += left.append.rows > 1
                kinds.update(AS_KV_HEADS[alike] for alike in left.as_kv_heads)
                found = compare_forwards(left, right.seen, limit, "of the same sequence by itself")
                if isinstance(found, str):
                    where = f"{text}, sequence {left.sequence} in a batch of {left.append.rows}"
                    return Judgement(looked, decisive, violation=Violation(line.step.index, f"{where}: {found}"))
                worst = max(worst, found)
        return Judgement(looked, decisive, worst, kinds=kinds)
