"""Turns an execution into a trace: what each operation did, in numbers that a reader can follow."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from harness.execution import Execution
from harness.findings import Finding
from harness.ledger import SequenceState
from harness.steps import ForwardStep, Step
from harness.target import PositionCall
from harness.trace import Trace


def record(run: Execution, finding: Finding | None, versions: dict[str, str]) -> Trace:
    """The trace of a run, with the finding that it ended in."""
    return Trace(
        target=run.target.identity.to_json(),
        program=run.program,
        finding=None
        if finding is None
        else {
            "property": finding.property_id,
            "step": finding.violation.step,
            "message": finding.message,
            "reproducible": finding.reproducible,
        },
        steps=tuple(_step(run, step) for step in run.steps),
        versions=versions,
    )


def _step(run: Execution, step: Step) -> dict[str, Any]:
    body: dict[str, Any] = {
        "operation": step.operation.text(),
        "sequence": step.operation.index,
        "owner": step.owner,
        "before": _state(step.before),
        "after": _state(step.after),
        **({"batch": list(step.rows)} if step.rows else {}),
    }
    if step.forwards:
        body["forwards"] = [_forward(run, forward) for forward in step.forwards]
    if step.removal is not None:
        body["caches_trimmed"] = len(step.removal.removed)
        body["removed"] = [int(n) for n in step.removal.removed]
        body["expected_removed"] = step.expected_removed
        if step.refuses or step.removal.refused is not None:
            body["must_be_refused"], body["refused"] = step.refuses, step.removal.refused
    if step.copied is not None:
        body["caches"] = step.copied.caches
        body["effective"] = step.effective
        if step.removal is None and (step.refuses or step.copied.refused is not None):
            body["must_be_refused"], body["refused"] = step.refuses, step.copied.refused
    if step.error is not None:
        body["error"] = " ".join(step.error.split())
    return body


def _state(state: SequenceState) -> dict[str, int]:
    return {"offset": state.offset, "live_start": state.live_start, "live_len": state.live_len}


def _forward(run: Execution, forward: ForwardStep) -> dict[str, Any]:
    layers, windows = run.target.attention_layers, run.target.windows
    calls = forward.seen.attention
    mapped = len(calls) <= len(layers)
    return {
        "tokens": len(forward.append.positions),
        "attention": [
            {
                "layer": layers[number] if mapped else None,
                **({"window": windows[number]} if mapped and windows[number] else {}),
                "queries": call.query_len,
                "keys": call.key_len,
                "values": call.value_len,
                "mask": call.mask,
                "mask_shape": None if call.mask_shape is None else list(call.mask_shape),
            }
            for number, call in enumerate(calls)
        ],
        "positions": [_positions(call) for call in forward.seen.positions],
    }


def _positions(call: PositionCall) -> dict[str, Any]:
    """First and last position are enough to read; the property compares all of them."""
    flat = np.asarray(call.positions).reshape(-1)
    return {
        "kind": call.kind,
        "first": _number(flat[0]) if flat.size else None,
        "last": _number(flat[-1]) if flat.size else None,
    }


def _number(value: Any) -> float | str:
    """A JSON number, or "nan" and "inf" in words: JSON has none."""
    number = float(value)
    return number if math.isfinite(number) else str(number)
