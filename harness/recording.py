"""Turns an execution into a trace: what each operation did, in numbers that a reader can follow."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np

from harness.cells import Cells, cells_of
from harness.execution import Execution
from harness.findings import Finding
from harness.ledger import SequenceState
from harness.oracle import of_layer, visible_set
from harness.rules import Run, runs_of
from harness.steps import ForwardStep, Step
from harness.target import AttentionCall, PositionCall, Target
from harness.trace import Trace

MOST_ENTRIES = 4096
"""Of a mask whose content a trace keeps entry by entry; of a larger one it keeps cells (``harness.cells``)."""


def record(run: Execution, finding: Finding | None, versions: dict[str, str]) -> Trace:
    """The trace of a run, with the finding that it ended in."""
    return Trace(
        target=run.target.identity.to_json(),
        program=run.program,
        finding=None if finding is None else _told(finding),
        steps=tuple(
            _step(run, step, finding is not None and step.index == finding.violation.step) for step in run.steps
        ),
        versions=versions,
    )


def bare_trace(target: Target, finding: Finding) -> dict[str, Any]:
    """The shortest trace that replays this finding, as JSON."""
    return Trace(target.identity.to_json(), finding.program, _told(finding), (), {}).bare().to_json()


def _told(finding: Finding) -> dict[str, Any]:
    return {
        "property": finding.property_id,
        "step": finding.violation.step,
        "message": finding.message,
        "reproducible": finding.reproducible,
    }


def _step(run: Execution, step: Step, broken: bool) -> dict[str, Any]:
    body: dict[str, Any] = {
        "operation": step.operation.text(),
        "sequence": step.operation.index,
        "owner": step.owner,
        "before": _state(step.before),
        "after": _state(step.after),
        **({"batch": list(step.rows)} if step.rows else {}),
    }
    if step.forwards:
        body["forwards"] = [_forward(run, forward, broken) for forward in step.forwards]
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


def _state(state: SequenceState) -> dict[str, Any]:
    return {"offset": state.offset, "live_start": state.live_start, **_keys(state.offset, state.held)}


def _keys(offset: int, runs: tuple[Run, ...]) -> dict[str, Any]:
    """``held``: first and last position of every run of keys, where they are not all right in front of the offset."""
    held = sum(stop - start for start, stop in runs)
    if runs in ((), ((offset - held, offset),)):
        return {"live_len": held}
    return {"live_len": held, "held": [[start, stop - 1] for start, stop in runs]}


def _forward(run: Execution, forward: ForwardStep, broken: bool) -> dict[str, Any]:
    """``broken``: what its masks show is kept as well."""
    layers, windows = run.target.attention_layers, run.target.windows
    calls = forward.seen.attention
    mapped = len(calls) <= len(layers)
    append = forward.append
    attention = [
        {
            "layer": layers[number] if mapped else None,
            **({"window": windows[number]} if mapped and windows[number] else {}),
            "queries": call.query_len,
            "keys": call.key_len,
            "values": call.value_len,
            "mask": call.mask,
            "mask_shape": None if call.mask_shape is None else list(call.mask_shape),
            **(_content(run, forward, call, number) if broken and mapped else {}),
        }
        for number, call in enumerate(calls)
    ]
    return {
        "tokens": len(append.positions),
        "after": {
            "offset": append.positions.stop,
            **_keys(append.positions.stop, runs_of((*append.held, *append.positions))),
        },
        "attention": _once(attention),
        "positions": [_positions(call) for call in forward.seen.positions],
    }


def _once(attention: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Most layers are given the same mask: its cells stand with the first call, others name that (``cells_of``, by its
    place among the calls of the forward)."""
    first: dict[str, int] = {}
    for number, call in enumerate(attention):
        if "cells" in call and first.setdefault(json.dumps(call["cells"]), number) != number:
            call["cells_of"] = first[json.dumps(call.pop("cells"))]
    return attention


def _content(run: Execution, forward: ForwardStep, call: AttentionCall, number: int) -> dict[str, Any]:
    """Which keys each query is shown, and which it must be: a row of 1 and 0 for each; of large masks in cells; by the
    slots of one sequence."""
    if call.shown is None or call.shown.ndim != 4:
        return {}
    visible = _visible(run, forward, number)
    head, shown = _first_wrong(call.shown, visible)
    told: dict[str, Any] = {"head": head} if head else {}
    if max(shown.size, visible.size) > MOST_ENTRIES:
        return told | {"cells": cells_of(shown, visible, call.key_len).to_json()}
    return told | {"shown": _rows(shown), "visible": _rows(visible)}


def cells(run: Execution, forward: ForwardStep, number: int) -> Cells | None:
    """The mask of a forward's attention call of this number; None where an engine tells no more than its shape."""
    call = forward.seen.attention[number]
    if call.shown is None or call.shown.ndim != 4:
        return None
    visible = _visible(run, forward, number)
    return cells_of(_first_wrong(call.shown, visible)[1], visible, call.key_len)


def _first_wrong(shown: np.ndarray[Any, Any], visible: np.ndarray[Any, Any]) -> tuple[int, np.ndarray[Any, Any]]:
    """Of a mask for every head [1, H, l or 1, K] the number and the entries of the first that is wrong; else of head
    0. Of one that is too wide or too narrow every head is."""
    heads = shown.reshape(-1, *shown.shape[-2:])
    fits = heads.shape[-1] == visible.shape[-1] and heads.shape[-2] in (1, visible.shape[-2])
    wrong = (number for number, entries in enumerate(heads) if fits and (entries != visible).any())
    head = next(wrong, 0) if len(heads) > 1 else 0
    return head, heads[head]


def _visible(run: Execution, forward: ForwardStep, number: int) -> np.ndarray[Any, Any]:
    rule = run.target.rules[number]
    return visible_set(of_layer(forward.append, rule), run.target.windows[number], rule)


def _rows(entries: np.ndarray[Any, Any]) -> list[str]:
    return ["".join("1" if entry else "0" for entry in row) for row in entries]


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
