"""The picture of a mask beside the keys: queries downwards, keys to the right, and what lies beyond them in a warning
colour. Large masks are drawn in cells (``harness.cells``), and the picture says for how much a cell stands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from itertools import groupby
from typing import Any

from harness.cells import BAD, BEYOND, HIDDEN, LACK, MIXED, SHOWN, Cells, cells_of_rows
from harness.reporting.checkpoint import mask_phrase
from harness.reporting.svg import label, svg
from harness.reporting.text import count
from harness.trace import Trace

MOST_CHARACTERS = 40_000
"""Of one picture: where cells change so often that it would be larger, they are made coarser."""
_LEFT, _CELL, _WIDE = 40, 12, 768
_SINGLE = 600  # cells that are drawn one by one, with a gap between them
_KINDS = {SHOWN: "shown", HIDDEN: "none", MIXED: "mixed", BAD: "bad", LACK: "lack", BEYOND: "beyond"}
"""The class of a page that a cell has."""
WORDS = {
    SHOWN: "shown",
    HIDDEN: "hidden",
    MIXED: "mixed: some shown, some hidden",
    BAD: "shown, and must not be",
    LACK: "must be shown",
    BEYOND: "beyond the keys",
}


def mask(trace: Trace) -> str | None:
    """The first mask of the step that broke, one that is wrong if there is one. None where the trace holds none."""
    return None if (found := first_mask(trace)) is None else mask_picture(*found)


def first_mask(trace: Trace) -> tuple[Cells, str] | None:
    """The same as cells, and in words which mask it is."""
    found = [(call, cells) for call in _calls(trace) if (cells := _cells(call)) is not None]
    if not found:
        return None
    call, cells = min(found, key=lambda each: not (each[1].wrong or each[1].beyond))
    layer = "a layer" if call["layer"] is None else f"layer {call['layer']}"
    layer += f", head {call['head']}" if "head" in call else ""
    return cells, f"{layer}, mask {_shape(call['mask_shape'])}"


def why_none(trace: Trace) -> str | None:
    """HTML in the place of the picture, where attention was given a mask of which the trace tells the shape alone; None
    where no mask was given."""
    call = next((call for call in _calls(trace) if call["mask_shape"] is not None), None)
    if call is None:
        return None
    if call["layer"] is None:
        why = "a forward with more attention calls than the model has layers does not say which mask is whose"
    else:
        why = (
            "the trace does not hold its entries: either the engine tells no more than its shape, or an older version "
            "wrote the trace, and the command that found it writes one that has them"
        )
    return f"<p>There is no picture of the mask {escape(_shape(call['mask_shape']))}: {why}.</p>"


def side_masks(record: Mapping[str, Any]) -> Iterator[str]:
    """Of the record of a checkpoint's validation: the first wrong mask of every side whose engine shows it."""
    for each in record.get("masks", ()):
        if each["cells"] is not None:
            yield mask_picture(Cells.from_json(each["cells"]), mask_phrase(each))


def mask_picture(cells: Cells, caption: str) -> str:
    """SVG. ``caption``: which mask this is."""
    picture = _drawn(cells, caption)
    while len(picture) > MOST_CHARACTERS and cells.rows[1:]:
        cells = cells.coarser()
        picture = _drawn(cells, caption)
    return picture


def _calls(trace: Trace) -> list[Mapping[str, Any]]:
    """The attention calls of the step that broke."""
    if trace.finding is None or trace.finding["step"] is None or trace.finding["step"] >= len(trace.steps):
        return []
    return [call for forward in trace.steps[trace.finding["step"]].get("forwards", ()) for call in forward["attention"]]


def _cells(call: Mapping[str, Any]) -> Cells | None:
    """None where the trace holds none, or names more than can be drawn."""
    try:
        if "cells" in call:
            return Cells.from_json(call["cells"])
        if call.get("shown") and call.get("visible"):
            return cells_of_rows(call["shown"], call["visible"], call["keys"])
    except ValueError:
        pass
    return None


def _drawn(cells: Cells, caption: str) -> str:
    columns, rows = len(cells.rows[0]), len(cells.rows)
    size = _CELL if max(columns, rows) * _CELL <= _WIDE else max(4, _WIDE // max(columns, rows))
    told = f"{count(cells.queries, 'query', 'queries')} (down) by {count(cells.keys, 'key')} (to the right)"
    told += f" and {cells.wide - cells.keys:,} beyond them" if cells.wide > cells.keys else ""
    if cells.block != (1, 1):
        down, across = cells.block
        told += f"; a cell is {count(down, 'query', 'queries')} by {count(across, 'key')}, at most"
        told += ", and one wrong entry makes it wrong"
    top, right, edge = 44, _LEFT + columns * size, _LEFT + cells.edge * size
    bottom = top + rows * size
    body = [label(0, 10, caption, "note"), label(0, 24, told, "note")]
    body += _numbers(cells, top, (edge, right), size)
    body += _single(cells, top, size) if columns * rows <= _SINGLE else _paths(cells, top, size)
    if cells.wide > cells.keys:
        body.append(f'<line class="edge" x1="{edge}" x2="{edge}" y1="{top - 4}" y2="{bottom + 4}"/>')
    low, x = bottom + 18, _LEFT
    for kind, words in WORDS.items():
        if kind == MIXED and not any(MIXED in row for row in cells.rows):
            continue
        body.append(f'<rect class="{_KINDS[kind]}" x="{x}" y="{low - 9}" width="{_CELL - 1}" height="{_CELL - 1}"/>')
        body.append(label(x + _CELL + 3, low, words, "note"))
        x += _CELL + 18 + 6 * len(words)
    wrong = f"{count(cells.wrong, 'entry is', 'entries are')} wrong, {cells.beyond:,} beyond the keys"
    wide = max(right, x, 6 * len(caption), 6 * len(told)) + 6
    return svg(wide, low + 8, "The mask beside the keys", f"{caption}: {told}; {wrong}", body)


def _numbers(cells: Cells, top: int, ends: tuple[int, int], size: int) -> Iterator[str]:
    """First and last of both axes, and the last key at the live edge; one that has no room is left out."""
    edge, right = ends
    placed = [(_LEFT, _LEFT + 7)]
    yield label(_LEFT, top - 6, "0", "note")
    for number, end in ((cells.keys - 1, edge), (cells.wide - 1, right)):
        start = end - 7 * len(str(number))
        if all(start > last + 4 or end < first - 4 for first, last in placed):
            placed.append((start, end))
            yield label(end, top - 6, str(number), "note", "end")
    yield label(_LEFT - 4, top + 9, "0", "note", "end")
    if (len(cells.rows) - 1) * size >= _CELL:
        yield label(_LEFT - 4, top + len(cells.rows) * size - 1, str(cells.queries - 1), "note", "end")


def _single(cells: Cells, top: int, size: int) -> Iterator[str]:
    for at, row in enumerate(cells.rows):
        for column, kind in enumerate(row):
            place = f'x="{_LEFT + column * size}" y="{top + at * size}" width="{size - 1}" height="{size - 1}"'
            yield f'<rect class="{_KINDS[kind]}" {place}/>'


def _paths(cells: Cells, top: int, size: int) -> Iterator[str]:
    """One for every kind, of the runs of its cells: a thousand cells stay small."""
    drawn: dict[str, list[str]] = {}
    for at, row in enumerate(cells.rows):
        column = 0
        for kind, run in groupby(row):
            length = len(list(run))
            x, y, wide = _LEFT + column * size, top + at * size, length * size
            drawn.setdefault(kind, []).append(f"M{x} {y}h{wide}v{size}h-{wide}z")
            column += length
    for kind in WORDS:
        if kind in drawn:
            plain = "" if kind == LACK else ' style="stroke:none"'  # frames of runs would be stripes
            yield f'<path class="{_KINDS[kind]}"{plain} d="{"".join(drawn[kind])}"/>'


def _shape(shape: object) -> str:
    return f"({', '.join(map(str, shape))})" if isinstance(shape, list) else "of no shape"
