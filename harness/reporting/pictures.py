"""Pictures of a trace as SVG: a timeline of what its sequences held, and the mask beside the keys where it broke.

Colours are classes, which the page that holds a picture defines (``harness.reporting.html``); every picture says in its
``desc`` what it shows, for whoever does not see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from harness.operations import Fork
from harness.reporting.explanation import runs
from harness.reporting.text import count
from harness.trace import Trace

Step = Mapping[str, Any]

_CELL = 12
_MOST_STEPS = 60
_MOST_KEYS = 512
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


def mask(trace: Trace) -> str | None:
    """The first mask of the step that broke: queries by keys. None where none was recorded (see
    ``harness.recording``)."""
    found = next(_masks(trace), None)
    if found is None:
        return None
    call, shown, visible = found
    keys, wide = call["keys"], max(call["keys"], len(shown[0]))
    if wide > _MOST_KEYS or max(len(shown), len(visible)) > _MOST_KEYS:
        return None
    body: list[str] = []
    wrong = beyond = 0
    for query in range(max(len(shown), len(visible))):
        for key in range(wide):
            kind = _kind(_at(shown, query, key), _at(visible, query, key), key >= keys)
            wrong += kind in ("bad", "lack")
            beyond += kind == "beyond"
            place = f'x="{40 + key * _CELL}" y="{24 + query * _CELL}" width="{_CELL - 1}" height="{_CELL - 1}"'
            body.append(f'<rect class="{kind}" {place}/>')
    rows = max(len(shown), len(visible))
    body.append(label(40, 16, f"{count(keys, 'key')} ->", "note"))
    body.append(label(0, 24 + _CELL, "queries", "note"))
    low = 24 + rows * _CELL + 14
    legend = [("shown", "shown"), ("none", "hidden"), ("bad", "shown, and must not be"), ("lack", "must be shown")]
    x = 40
    for kind, words in [*legend, ("beyond", "beyond the keys")]:
        body.append(f'<rect class="{kind}" x="{x}" y="{low - 9}" width="{_CELL - 1}" height="{_CELL - 1}"/>')
        body.append(label(x + _CELL + 3, low, words, "note"))
        x += _CELL + 18 + 6 * len(words)
    layer = "a layer" if call["layer"] is None else f"layer {call['layer']}"
    told = (
        f"{layer}: {count(len(shown), 'row')} of {count(len(shown[0]), 'entry', 'entries')} over {count(keys, 'key')}"
    )
    told += f"; {count(wrong, 'entry is', 'entries are')} wrong, {beyond} beyond the keys"
    return svg(max(40 + wide * _CELL, x) + 6, low + 8, "The mask beside the keys", told, body)


def _masks(trace: Trace) -> Iterator[tuple[Mapping[str, Any], Sequence[str], Sequence[str]]]:
    """A call of the step that broke with its mask and what it must show; those that differ come first."""
    if trace.finding is None or trace.finding["step"] is None or trace.finding["step"] >= len(trace.steps):
        return
    calls = [
        call
        for forward in trace.steps[trace.finding["step"]].get("forwards", ())
        for call in forward["attention"]
        if call.get("shown") and call.get("visible")
    ]
    for call in sorted(calls, key=lambda call: call["shown"] == call["visible"]):
        yield call, call["shown"], call["visible"]


def _at(rows: Sequence[str], query: int, key: int) -> bool | None:
    """None where there is no such entry; one row stands for all."""
    row = rows[0] if len(rows) == 1 else rows[query] if query < len(rows) else ""
    return row[key] == "1" if key < len(row) else None


def _kind(shown: bool | None, visible: bool | None, beyond: bool) -> str:
    if beyond:
        return "none" if shown is None else "beyond"
    if shown and not visible:
        return "bad"
    if visible and not shown:
        return "lack"
    return "shown" if shown else "none"


def svg(width: float, height: float, title: str, told: str, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<desc>{escape(told)}</desc>", *body, "</svg>"])


def label(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def _cut(text: str, wide: float) -> str:
    most = int(wide // 6)
    return text if len(text) <= most else f"{text[: max(most - 1, 1)]}…"


def pictures(trace: Trace) -> list[str]:
    """Those that there are. [] also where the steps are none that this version writes."""
    try:
        return [picture for picture in (mask(trace), timeline(trace)) if picture is not None]
    except (KeyError, TypeError, AttributeError, IndexError):
        return []
