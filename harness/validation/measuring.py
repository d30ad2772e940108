"""Runs one planned program on one side, and says in plain values (JSON) what it came to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from harness.comparison import bytes_of
from harness.execution import Execution
from harness.findings import Finding
from harness.judge import Judge
from harness.judging import Judgement, Property, attention_calls, is_blind
from harness.recording import bare_trace, cells
from harness.steps import ForwardStep, Step
from harness.tally import Tally
from harness.target import Target
from harness.validation.judged import NO_FIT, OF_MASKS
from harness.validation.plan import Planned

DECIDED = 0.05
"""The least gap of the two largest logits of a token, in deviations of its logits, at which its greedy token counts as
decided: nearer ones may change places by rounding alone."""

Result = dict[str, Any]
Keep = Callable[[Execution, Finding], str]
Tick = Callable[[str], None]


class _Listener(Tally):
    """Counts, and keeps the first finding of every property and why a comparison said nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Judgement] = {}
        self.doubts: dict[str, str] = {}

    def on_judgement(self, prop: Property, judgement: Judgement) -> None:
        super().on_judgement(prop, judgement)
        if judgement.violation is not None:
            self.found.setdefault(prop.id, judgement)
        if judgement.inconclusive is not None:
            self.doubts.setdefault(prop.id, judgement.inconclusive)


def measure(target: Target, planned: Planned, judges: Sequence[Property], keep: Keep, tick: Tick) -> Result:
    """Run the program under these properties, all of which go on behind a finding. ``keep`` writes the trace of a
    finding and returns the command that replays it; ``tick`` is told in words how far it is, and may interrupt it.

    The result has ``properties`` (id -> steps, decisive, worst, doubt), ``findings``, ``forwards`` (how many, and how
    many of them blind), ``digests`` and ``greedy`` tokens of every forward, where and why it ``stopped`` before its
    end, the ``crash``, if a mask did not fit, and the first ``mask`` that was wrong in any way.
    """
    listener = _Listener()
    judge = Judge(target, planned.program.owners, judges, listener, muted={prop.id for prop in judges})
    operations = planned.program.operations
    for number, operation in enumerate(operations):
        if judge.stopped:
            break
        tick(f"operation {number + 1} of {len(operations)}, {operation.text()}")
        judge.apply(operation)
    tick(f"{len(judge.run.steps)} operations done, comparing")
    judge.end()
    run = judge.run
    forwards = [forward for step in run.steps for forward in step.forwards]
    done = [forward.seen.logits for forward in forwards if forward.seen.logits is not None]
    return {
        "program": planned.name,
        "properties": {
            name: {
                "steps": counted.steps,
                "decisive": counted.decisive_steps,
                "worst": None if counted.worst is None else f"{counted.worst:.3g}",
                "doubt": listener.doubts.get(name),
            }
            for name, counted in listener.properties.items()
        },
        "findings": [_finding(run, prop, judgement, keep) for prop, judgement in listener.found.items()],
        "forwards": len(forwards),
        "blind": sum(is_blind(run, forward) for forward in forwards),
        "digests": [hashlib.sha256(bytes_of(logits)).hexdigest()[:16] for logits in done],
        "greedy": [greedy(logits) for logits in done],
        "stopped": _stopped(run),
        "crash": _crash(run),
        "mask": _mask(run, listener.found),
    }


def greedy(logits: np.ndarray[Any, Any]) -> list[int]:
    """The greedy token of every row of [l, vocab]; -1 where it is not decided (see DECIDED)."""
    if logits.shape[-1] < 2:
        return [-1] * len(logits)
    two = np.partition(logits, -2, axis=-1)[:, -2:]
    decided = two[:, 1] - two[:, 0] > DECIDED * logits.std(axis=-1)
    return [int(token) for token in np.where(decided, logits.argmax(axis=-1), -1)]


def _finding(run: Execution, prop: str, judgement: Judgement, keep: Keep) -> dict[str, Any]:
    assert judgement.violation is not None
    return told_of(run, Finding(prop, run.target.identity.name, judgement.violation, run.program), keep)


def told_of(run: Execution, finding: Finding, keep: Keep) -> dict[str, Any]:
    """A finding as a record has it, but for the name of its program. ``run``: of its program."""
    return {
        "property": finding.property_id,
        "target": finding.target,
        "message": " ".join(finding.message.split()),
        "program_text": str(run.program),
        "replay": keep(run, finding),
        "trace": bare_trace(run.target, finding),
    }


def _stopped(run: Execution) -> dict[str, Any] | None:
    """At which operation, counted from 1, and why; None where the program got to its end."""
    if not run.stopped:
        return None
    last = run.steps[-1]
    why = last.error or "a rollback was refused that had to be done, or done that had to be refused"
    return {"operation": last.index + 1, "text": last.operation.text(), "why": " ".join(why.split())}


def _crash(run: Execution) -> dict[str, Any] | None:
    """The first forward whose mask does not fit its keys: the shapes of the mask and of the scores, and what was
    raised."""
    for step in run.steps:
        for forward in step.forwards:
            for layer, call in attention_calls(run, forward):
                if call.mask_shape is not None and call.mask_keys not in (None, call.key_len):
                    scores = [1, call.heads, call.query_len, call.key_len]
                    return _told(step, forward, layer, list(call.mask_shape), scores)
    return None


def _mask(run: Execution, found: Mapping[str, Judgement]) -> dict[str, Any] | None:
    """The first call whose mask does not fit its keys or shows other keys than it must, where a property says that
    there is one: in cells, or without them from an engine that tells no more than its shape. Without a call where MLX
    refused the mask before attention was given it. None where no mask was wrong."""
    at = [found[name].violation for name in OF_MASKS if name in found]
    if (first := min((each.step for each in at if each is not None and each.step is not None), default=None)) is None:
        broken = run.steps[-1] if run.steps else None
        if broken is None or NO_FIT not in (broken.error or ""):
            return None
        return {"operation": broken.operation.text(), "layer": None, "mask_shape": None, "cells": None}
    step = run.steps[first]
    for forward in step.forwards:
        for number, (layer, call) in enumerate(attention_calls(run, forward)):
            if not call.explicit:
                continue
            drawn = cells(run, forward, number)
            fits = call.mask_keys in (None, call.key_len)
            if (drawn is None and fits) or (drawn is not None and not drawn.wrong and not drawn.beyond):
                continue
            return {
                "operation": step.operation.text(),
                "layer": layer,
                "mask_shape": None if call.mask_shape is None else list(call.mask_shape),
                "cells": None if drawn is None else drawn.to_json(),
            }
    return None


def _told(step: Step, forward: ForwardStep, layer: int, mask: list[int], scores: list[int]) -> dict[str, Any]:
    positions, error = forward.append.positions, forward.seen.error
    return {
        "operation": step.operation.text(),
        "offset": positions.start,
        "live_len": len(forward.append.held),
        "layer": layer,
        "mask_shape": mask,
        "score_shape": scores,
        "error": None if error is None else " ".join(error.split()),
    }
