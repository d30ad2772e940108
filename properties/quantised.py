"""Quantised caches: what they hold of the rows that they were given, and what they refuse to take."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property
from harness.operations import QuantizeCache
from harness.quantised import bytes_of_a_row, largest_error
from harness.steps import Step
from harness.target import Capability
from harness.telling import Told
from properties.copies import first_change


class QuantisedRowsStayWithinTheirBound(Property):
    id = "quantised_rows_stay_within_their_bound"
    sentence = (
        "A quantised cache holds every row within the error of its storage from the row that it was given, in no more "
        "bytes than that storage takes; where it cannot, it refuses before anything is changed."
    )
    decisive_when = "a quantised cache holds rows, or one must refuse"
    needs: ClassVar = frozenset({Capability.QUANTISE, Capability.LENGTHS, Capability.ROWS})

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        if not step.told:
            return None
        if isinstance(step.operation, QuantizeCache) and (refusal := _refusal(run, step)) is not None:
            return Judgement(1, 1, violation=Violation(step.index, f"{step.operation.text()}: {refusal}"))
        looked = decisive = int(isinstance(step.operation, QuantizeCache) and step.refuses)
        worst: float | None = None
        for sequence in sorted(step.acted):
            told = step.told[sequence]
            if told.state.storage == "rows":
                continue
            found = _rows(run, told)
            message = found if isinstance(found, str) else _bytes(run, told)
            if message is not None:
                text = f"{step.operation.text()}, sequence {sequence} ({told.state.storage}), {message}"
                return Judgement(looked + 1, decisive + 1, worst, Violation(step.index, text))
            if isinstance(found, float):
                looked, decisive, worst = looked + 1, decisive + 1, max(found, worst or 0.0)
        return Judgement(looked, decisive, worst)


def _refusal(run: Execution, step: Step) -> str | None:
    """What is wrong with whether the operation was refused, or with what that left behind."""
    assert isinstance(step.operation, QuantizeCache) and step.copied is not None
    if step.refuses != (step.copied.refused is not None):
        if step.refuses:
            return f"it was not refused, although the caches store {step.before.storage} or their rows do not fit"
        return f"it was refused ({step.copied.refused}), and nothing is in its way"
    if not step.refuses or not step.index:
        return None
    index = step.operation.index
    change = first_change(run.target.attention_layers, run.steps[step.index - 1].told[index], step.told[index])
    return None if change is None else f"it was refused, and yet {change}"


def _rows(run: Execution, told: Told) -> float | str | None:
    """The largest distance from the rows given, or what is wrong; None where nothing is held or known."""
    number_of = dict(zip(told.held, told.numbers, strict=True))
    worst: float | None = None
    for cache, (layer, rows) in enumerate(zip(run.target.attention_layers, told.rows, strict=False)):
        positions = told.held if rows.positions is None else rows.positions
        if rows.keys.shape[-2] != len(positions) or not number_of.keys() >= set(positions):
            continue  # keys_equal_ledger_live_length says so
        known, *given = run.given.of(cache, [number_of[position] for position in positions])
        if not known:
            continue
        for what, was, held in zip(("key", "value"), given, (rows.keys, rows.values), strict=True):
            off = np.abs(held[:, :, known].astype(np.float64) - was)
            allowed = largest_error(told.state.storage, was)
            if (wrong := np.argwhere(~(off <= allowed))).size:  # a nan is no number that anything allows
                at = tuple(wrong[0])
                return (
                    f"layer {layer}: entry {at[3]} of the {what} row of position {positions[known[at[2]]]} (head "
                    f"{at[1]}) was given as {was[at]:.9g} and is held as {held[:, :, known][at]:.9g}: {off[at]:.3g} "
                    f"off, {allowed[at]:.3g} allowed"
                )
            worst = max(worst or 0.0, float(off.max(initial=0.0)))
    return worst


def _bytes(run: Execution, told: Told) -> str | None:
    for layer, rows, memory in zip(run.target.attention_layers, told.rows, told.memory, strict=False):
        heads = [(side.shape[1], side.shape[3]) for side in (rows.keys, rows.values)]
        allowed = sum(count * bytes_of_a_row(told.state.storage, width) for count, width in heads)
        if rows.keys.shape[2] and memory.per_slot > allowed:
            return f"layer {layer}: a slot takes {memory.per_slot} bytes, allowed are {allowed}"
    return None
