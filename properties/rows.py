"""Rows: what was cached for a position stays what it was."""

from __future__ import annotations

from itertools import pairwise
from typing import ClassVar

import numpy as np

from harness.comparison import compare_bytes
from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property, nothing_is_removed
from harness.rules import CacheRule
from harness.steps import Step
from harness.target import CacheRows, Capability, Target
from harness.telling import Told


class CachedRowsStayWhatTheyWere(Property):
    id = "cached_rows_stay_what_they_were"
    sentence = (
        "The key and value rows of a position are the same bytes, in its slot, for as long as the sequence holds it, "
        "or until it is quantised."
    )
    decisive_when = "a trim or rollback removed rows and others stayed, which are not all alike"
    needs: ClassVar = frozenset({Capability.ROWS})

    def never_decisive(self, target: Target) -> str | None:
        return nothing_is_removed(target)

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        """Compares with the step before; step by step that covers the whole life of a row."""
        if not step.told or step.index == 0:
            return Judgement()
        before = run.steps[step.index - 1].told
        looked = decisive = 0
        for sequence, (old, new) in enumerate(zip(before, step.told, strict=True)):
            if sequence == step.replaced or old.state.storage != new.state.storage:
                continue  # other tokens stand at its positions now, or their rows have been quantised
            if not set(old.held).intersection(new.held) or not _comparable(run, old, new):
                continue
            looked += 1
            worst = self._first_difference(run, step, sequence, old, new)
            if worst is not None:
                return Judgement(looked, decisive + 1, violation=worst)
            acted = sequence == step.operation.index and bool(step.expected_removed)
            decisive += acted and any(_unlike(rows) for rows in new.rows)
        return Judgement(looked, decisive)

    @staticmethod
    def _first_difference(run: Execution, step: Step, sequence: int, old: Told, new: Told) -> Violation | None:
        layers = zip(run.target.attention_layers, run.target.rules, old.rows, new.rows, strict=False)
        for layer, rule, a, b in layers:
            before, after = _positions(rule, old, a), _positions(rule, new, b)
            kept = np.intersect1d(before, after)
            if not kept.size:
                continue  # without a row the other axes say nothing
            was, now = np.searchsorted(before, kept), np.searchsorted(after, kept)
            for what, left, right in (("key", a.keys, b.keys), ("value", a.values, b.values)):
                left, right = left[..., was, :], right[..., now, :]
                if left.shape != right.shape or left.dtype != right.dtype:
                    was_of, is_of = (f"{side.dtype}{list(side.shape)}" for side in (left, right))
                    message = f"layer {layer}: the {what} rows of sequence {sequence} were {was_of} and are {is_of}"
                    return Violation(step.index, message)
                difference = compare_bytes(left, right)
                if not difference.same_bytes:
                    at = (difference.index or (0, 0, 0, 0))[-2]
                    acted = step.operation.index
                    where = step.operation.text() + (f" on sequence {acted}" if sequence not in step.acted else "")
                    return Violation(
                        step.index,
                        f"layer {layer}: the {what} row of position {kept[at]} (sequence {sequence}, slot {was[at]} "
                        f"before {where}, slot {now[at]} after) changed by {difference.largest:.3g}",
                    )
        return None


def _comparable(run: Execution, old: Told, new: Told) -> bool:
    """As many rows as positions on both sides, and these in order? If not, keys_equal_ledger_live_length says so."""
    return all(
        rows.keys.shape[-2] == rows.values.shape[-2] == len(positions) and all(a < b for a, b in pairwise(positions))
        for told in (old, new)
        for rule, rows in zip(run.target.rules, told.rows, strict=False)
        for positions in [_positions(rule, told, rows)]
    )


def _unlike(rows: CacheRows) -> bool:
    """Would it be seen if they changed places? Rows that are all alike (zeros) stay what they were whoever stays."""
    sides = [side for side in (rows.keys, rows.values) if side.size]
    return any(bool((side != side[..., :1, :]).any()) if side.shape[-2] > 1 else bool(side.any()) for side in sides)


def _positions(rule: CacheRule | None, told: Told, rows: CacheRows) -> tuple[int, ...]:
    """Of the rows that one cache holds, ascending: those of the ledger, unless it forgets by a rule."""
    return told.held if rule is None or rows.positions is None else rows.positions
