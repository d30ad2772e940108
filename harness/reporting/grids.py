"""Pictures of tables that are too large to read: the kill matrix, and what became of every property over many runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.reporting.svg import label, svg
from harness.reporting.text import count

CELL = 13
_LETTER = 6.4  # pixels of a letter of 10 pixels, on the safe side


@dataclass(frozen=True)
class Grid:
    """``cells[row][column]``: a class of the page (``shown``, ``lack``, ``bad``, ``none``), or None for an empty place.
    ``words``: what the classes mean here."""

    title: str
    told: str
    rows: Sequence[str]
    columns: Sequence[str]
    cells: Sequence[Sequence[str | None]]
    words: Mapping[str, str]

    def picture(self) -> str:
        """SVG: names at the left, columns upright above; one path per class, so that a thousand cells stay small."""
        left = max(len(name) for name in self.rows) * _LETTER + 8
        top = max(len(name) for name in self.columns) * _LETTER + 8
        body = [label(left - 6, top + row * CELL + 10, name, "note", "end") for row, name in enumerate(self.rows)]
        for column, name in enumerate(self.columns):
            x, y = left + column * CELL + 10, top - 4
            body.append(f'<g transform="translate({x:g} {y:g}) rotate(-90)">{label(0, 0, name, "note")}</g>')
        for kind in self.words:
            steps = "".join(
                f"M{left + column * CELL + 1:g} {top + row * CELL + 1:g}h{CELL - 3}v{CELL - 3}h-{CELL - 3}z"
                for row, line in enumerate(self.cells)
                for column, cell in enumerate(line)
                if cell == kind
            )
            if steps:
                body.append(f'<path class="{kind}" d="{steps}"/>')
        low, x, wide = top + len(self.rows) * CELL + 16, 4.0, left + len(self.columns) * CELL
        for kind, words in self.words.items():
            body.append(f'<rect class="{kind}" x="{x:g}" y="{low - 9:g}" width="{CELL - 3}" height="{CELL - 3}"/>')
            body.append(label(x + CELL + 3, low, words, "note"))
            x += CELL + 18 + _LETTER * len(words)
        return svg(max(wide, x) + 6, low + 8, self.title, self.told, body)


def kill_matrix(record: Mapping[str, Any]) -> str | None:
    """Planted bugs by runs: the worst of all seeds in every cell. None where nothing was hunted."""
    hunts = record["hunts"]
    runs = list(dict.fromkeys(one["run"] for one in hunts))
    if not hunts:
        return None
    found: dict[tuple[str, str], str] = {}
    for one in hunts:
        kind = "bad" if one["by"] is None else "shown" if one["named"] else "lack"
        place = (one["fault"], one["run"])
        found[place] = max(found.get(place, kind), kind, key=("shown", "lack", "bad").index)
    faults = [name for name in record["faults"] if any((name, run) in found for run in runs)]
    kinds = list(found.values())
    told = (
        f"{count(len(faults), 'planted bug')} in {count(len(runs), 'run')}: {count(len(kinds), 'cell')}, "
        f"{kinds.count('shown')} found by the property that they name, {kinds.count('lack')} by another alone, "
        f"{kinds.count('bad')} not found with every seed"
    )
    words = {"shown": "found", "lack": "found by another property alone", "bad": "not found with every seed"}
    cells = [[found.get((name, run)) for run in runs] for name in faults]
    return Grid("Planted bugs by runs", told, faults, runs, cells, words).picture()


MOST_RUNS = 40  # the newest, in a picture
_KINDS = {
    "PASS": "shown",
    "FAIL": "bad",
    "KNOWN": "bad",
    "VACUOUS": "lack",
    "INCONCLUSIVE": "lack",
    "NOT APPLICABLE": "none",
}


def over_time(target: str, runs: Sequence[Mapping[str, Any]]) -> str | None:
    """Properties of one target by its runs, entries of ``harness.reporting.history``, oldest at the left. None where no
    run says what became of a property."""
    last = [one for one in runs if one["verdicts"]][-MOST_RUNS:]
    if not last:
        return None
    names = sorted({name for one in last for name in one["verdicts"]})
    cells = [[_KINDS.get(one["verdicts"].get(name, "")) for one in last] for name in names]
    kinds = [cell for line in cells for cell in line]
    told = (
        f"{target}: {count(len(names), 'property', 'properties')} in {count(len(last), 'run')}; "
        f"{kinds.count('bad')} cells say FAIL or KNOWN, {kinds.count('lack')} VACUOUS or INCONCLUSIVE"
    )
    words = {"shown": "PASS", "bad": "FAIL or KNOWN", "lack": "VACUOUS or INCONCLUSIVE", "none": "NOT APPLICABLE"}
    return Grid(f"Properties of {target}", told, names, [one["at"][:10] for one in last], cells, words).picture()
