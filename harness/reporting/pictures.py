"""Pictures of a trace as SVG: a timeline of what its sequences held, and the mask beside the keys where it broke."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.operations import Fork
from harness.reporting.explanation import runs
from harness.reporting.masks import mask, why_none
from harness.reporting.svg import label, svg
from harness.reporting.text import count
from harness.trace import Trace

Step = Mapping[str, Any]

_MOST_STEPS = 60
_HEIGHT = 90.0  # of a lane, for the largest offset


def timeline(trace: Trace) -> str | None:
    """What every sequence held behind every step: the keys between live_start and offset. None where there is nothing
    to draw, or too much."""
    steps = trace.steps
    if not 1 <= len(steps) <= _MOST_STEPS:
        return None
    offsets = [step["after"]["offset"] for step in steps]
    most = max([*offsets, *(forward["after"]["offset"] for step in steps for forward in step.get("forwards", ()))])
    scale = _HEIGHT / max(most, 1)
    named = {row for step in steps for row in (step["sequence"], *step.get("batch", ()))}
    lanes = sorted(named | {each.into for each in trace.program.operations[: len(steps)] if isinstance(each, Fork)})
    wide = max(44, min(110, 1100 // len(steps)))
    broken = trace.finding["step"] if trace.finding is not None else None
    body: list[str] = []
    for lane, sequence in enumerate(lanes):
        bottom = (lane + 1) * (_HEIGHT + 44) - 12
        body.append(label(0, bottom - _HEIGHT - 22, f"sequence {sequence}: keys of positions", "note"))
        body.append(f'<line class="axis" x1="40" x2="{40 + wide * len(steps)}" y1="{bottom:g}" y2="{bottom:g}"/>')
        body.append(label(36, bottom + 4, "0", "note", "end"))
        body.append(label(36, bottom - most * scale + 4, str(most), "note", "end"))
        offset, held = 0, _NONE
        for number, step in enumerate(steps):
            operation = trace.program.operations[number]
            mine = step["sequence"] == sequence or sequence in step.get("batch", ())
            forked = isinstance(operation, Fork) and operation.into == sequence
            offset, held = _state(step["after"]) if forked else _after(step, sequence, (offset, held))
            if not offset:
                continue
            x = 40 + number * wide
            body.extend(_bar(x, bottom, wide, scale, (offset, held), number == broken and mine))
            if step["sequence"] == sequence and step["after"]["live_start"] > step["before"]["live_start"]:
                low = bottom - (held[-1][0] if held else offset) * scale + 11
                body.append(label(x + wide / 2, min(low, bottom + 11), "trim", "mark", "middle"))
    low = len(lanes) * (_HEIGHT + 44)
    for number, step in enumerate(steps):
        what = step["operation"] if len(step["operation"]) * 6 <= wide else step["operation"].split("(")[0]
        body.append(label(40 + number * wide + wide / 2, low + 4, _cut(what, wide), "note", "middle"))
    told = f"{count(len(steps), 'step')}; a bar is the keys that a sequence holds, by position; the line is its offset"
    if broken is not None and broken < len(steps):
        told += f"; step {broken + 1}, {steps[broken]['operation']}, is where it broke"
    return svg(40 + wide * len(steps) + 6, low + 12, "What the sequences held, step by step", told, body)


Held = list[list[int]]
_NONE: Held = []


def _state(state: dict[str, Any]) -> tuple[int, Held]:
    return state["offset"], runs(state)


def _after(step: Step, sequence: int, before: tuple[int, Held]) -> tuple[int, Held]:
    """Offset and keys of a sequence behind a step. Of a batch a step tells the state of one, its forwards of all."""
    rows, forwards = step.get("batch", ()), step.get("forwards", ())
    if step["sequence"] == sequence and not (rows and forwards):
        return _state(step["after"])
    for position, forward in enumerate(forwards):
        if rows and rows[position % len(rows)] == sequence:
            before = _state(forward["after"])
    return before


def _bar(x: float, bottom: float, wide: float, scale: float, state: tuple[int, Held], broken: bool) -> Iterator[str]:
    offset, held = state
    for first, last in held:
        top, high = bottom - (last + 1) * scale, max((last + 1 - first) * scale, 1)
        kind = "bad" if broken else "held"
        yield f'<rect class="{kind}" x="{x + 3:g}" y="{top:.1f}" width="{wide - 6:g}" height="{high:.1f}"/>'
    top = bottom - offset * scale
    yield f'<line class="edge" x1="{x:g}" x2="{x + wide:g}" y1="{top:.1f}" y2="{top:.1f}"/>'
    keys = sum(last + 1 - first for first, last in held)
    yield label(x + wide / 2, top - 3, f"{keys} of {offset}", "note", "middle")


def _cut(text: str, wide: float) -> str:
    most = int(wide // 6)
    return text if len(text) <= most else f"{text[: max(most - 1, 1)]}…"


def pictures(trace: Trace) -> list[str]:
    """Those that there are, and in the place of a mask that cannot be drawn a sentence that says why. [] also where the
    steps are none that this version writes."""
    try:
        return [each for each in (mask(trace) or why_none(trace), timeline(trace)) if each is not None]
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        return []
