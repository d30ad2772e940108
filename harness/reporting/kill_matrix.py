"""The kill matrix: planted bugs by runs, as Markdown and as a record."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness.reporting.files import write_atomically
from harness.reporting.grids import kill_matrix
from harness.reporting.html import html_page
from harness.reporting.record import record_text
from harness.reporting.sources import linked, with_links
from harness.reporting.text import block, count, escape, table

SCHEMA = "kv-harness-kill-matrix"
SCHEMA_VERSION = 1
NAME = "kill-matrix"  # of its files, in the folder ``faults`` of the reports


@dataclass(frozen=True)
class Summary:
    """Of many hunts: for how many bugs, how many killed, how many of those by the property named as well, and the
    medians over them."""

    bugs: int
    hunts: int
    killed: int
    named: int
    median_seconds: float | None
    median_programs: float | None
    median_operations: float | None

    def text(self) -> str:
        """The last line of a report."""
        told = f"{self.killed} of {self.hunts} hunts found their bug (planted: {self.bugs})"
        if not self.killed:
            return told
        if self.named < self.killed:
            told += f", {self.killed - self.named} of them not by the property that they name"
        told += f"; median {self.median_seconds:.2f} s and {self.median_programs:g} programs to the first sight"
        return told if self.median_operations is None else f"{told}, shrunk to {self.median_operations:g} operations"


def summarise(hunts: Sequence[Mapping[str, Any]]) -> Summary:
    """Medians over what was killed; None where nothing was."""
    killed = [one for one in hunts if one["by"] is not None]

    def median(name: str) -> float | None:
        values = [value for one in killed if (value := one[name]) is not None]
        return statistics.median(values) if values else None

    named = sum(one["named"] for one in killed)
    return Summary(
        len({one["fault"] for one in hunts}),
        len(hunts),
        len(killed),
        named,
        median("seconds"),
        median("after"),
        median("operations"),
    )


def matrix_record(
    hunts: Sequence[Mapping[str, Any]],
    *,
    faults: Mapping[str, Mapping[str, Any]],
    profile: str,
    seeds: Sequence[int],
    versions: Mapping[str, str],
    device: str,
    command: str,
    partial: bool,
) -> dict[str, Any]:
    """All that the Markdown is made from. ``faults``: id -> summary, layer, breaks, source; ``hunts``: see
    ``harness.detection.Hunt``; ``partial``: it was interrupted."""
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "profile": profile,
        "seeds": list(seeds),
        "device": device,
        "versions": dict(versions),
        "command": command,
        "partial": partial,
        "faults": {name: dict(fault) for name, fault in faults.items()},
        "hunts": [dict(one) for one in hunts],
        "summary": _summary(hunts),
    }


def _summary(hunts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    made = summarise(hunts)
    return {**asdict(made), "text": made.text()}


def merged(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Matrices of other seeds, families or bugs as one: the same in whatever order, and however often, they are given.

    Of two hunts for one bug in one run with one seed the worse one stays.  It is partial where a seed lacks what
    another has, or a partial one names bugs that nobody hunted.  ValueError for matrices that do not compare: another
    profile, device, or other versions.
    """
    first = records[0]
    for other in records[1:]:
        for name in ("profile", "device", "versions"):
            if other[name] != first[name]:
                raise ValueError(f"kill matrices with another {name.rstrip('s')}: {first[name]} and {other[name]}")
    hunts: dict[tuple[str, str, int], dict[str, Any]] = {}
    for one in (one for record in records for one in record["hunts"]):
        place = (one["fault"], one["run"], one["seed"])
        hunts[place] = max(hunts.get(place, one), one, key=_worse)
    faults = {name: fault for record in records for name, fault in record["faults"].items()}
    same = all(list(record["faults"]) == list(faults) for record in records)
    order = list(faults) if same else sorted(faults)
    seeds = sorted({seed for record in records for seed in record["seeds"]})
    whole = {place[:2] for place in hunts}
    runs = sorted({run for _, run, _ in hunts})
    hunted = {fault for fault, _ in whole}

    def place_of(one: Mapping[str, Any]) -> tuple[int, int, int]:
        return order.index(one["fault"]), one["seed"], runs.index(one["run"])

    unknown = any(record["partial"] and set(record["faults"]) - hunted for record in records)
    return {
        **first,
        "seeds": seeds,
        "command": "\n".join(sorted({line for record in records for line in record["command"].split("\n")})),
        "partial": unknown or len(hunts) < len(whole) * len(seeds),
        "faults": {name: faults[name] for name in order},
        "hunts": sorted(hunts.values(), key=place_of),
        "summary": _summary(list(hunts.values())),
    }


def checked(record: Any) -> dict[str, Any]:
    """A matrix that is one. ValueError, LookupError, TypeError or AttributeError where it is not."""
    texts = [record[name] for name in ("profile", "device", "command")]
    texts += [*record["versions"].values(), *(one[name] for one in record["hunts"] for name in ("fault", "run"))]
    texts += [one["by"] for one in record["hunts"] if one["by"] is not None]
    whole = [*record["seeds"], *(one[name] for one in record["hunts"] for name in ("seed", "programs"))]
    measured = [one[name] for one in record["hunts"] for name in ("after", "seconds", "operations")]
    if not (
        all(isinstance(text, str) for text in texts)
        and all(type(number) is int for number in whole)
        and all(number is None or type(number) in (int, float) for number in measured)
        and all(type(one["named"]) is bool for one in record["hunts"])
    ):
        raise TypeError("a field is not of its type")
    made = merged([record])
    matrix_markdown(made).encode()
    kill_matrix(made)
    return dict(record)


def write_matrix(folder: Path, record: Mapping[str, Any]) -> None:
    """Record, Markdown, and the page with its picture."""
    markdown, picture = matrix_markdown(record), kill_matrix(record)
    write_atomically(folder / f"{NAME}.json", record_text(record))
    write_atomically(folder / f"{NAME}.md", markdown)
    page = with_links(html_page(markdown, {"Found": [picture] if picture else []}))
    write_atomically(folder / f"{NAME}.html", page)


def _worse(one: Mapping[str, Any]) -> tuple[bool, bool, str]:
    return one["by"] is None, not one["named"], json.dumps(one, sort_keys=True)


def matrix_markdown(record: Mapping[str, Any]) -> str:
    """A row per planted bug, a column per run, then what each bug is; survivors come first, the summary last."""
    hunts: list[Mapping[str, Any]] = record["hunts"]
    names = list(dict.fromkeys(one["run"] for one in hunts))
    rows = []
    for fault in record["faults"]:
        mine = [one for one in hunts if one["fault"] == fault]
        killers = Counter(one["by"] for one in mine if one["by"] is not None)
        rows.append(
            (
                fault,
                ", ".join(by for by, _ in killers.most_common()) or "none",
                *(_cell([one for one in mine if one["run"] == name]) for name in names),
            )
        )
    survivors = [
        f"- {escape(one['fault'])} in {escape(one['run'])}, seed {one['seed']}: not found in "
        f"{count(one['programs'], 'program')}"
        for one in hunts
        if one["by"] is None
    ]
    unnamed = [
        f"- {escape(one['fault'])} in {escape(one['run'])}, seed {one['seed']}: {escape(one['by'])} alone finds it"
        for one in hunts
        if one["by"] is not None and not one["named"]
    ]
    about = [
        (name, fault["layer"], fault["breaks"], fault["summary"], linked(fault["source"]))
        for name, fault in record["faults"].items()
    ]
    cell = (
        "A cell: programs until it was first seen (p), the most of any seed, and operations of the shrunk program "
        "(op), which the first seed alone looks for; in front, in how many of the seeds it was found, where not in "
        "all. -: it cannot show there."
    )
    seeds = ", ".join(map(str, record["seeds"]))
    sections = (
        "# Kill matrix: planted bugs by family",
        f"Profile {record['profile']}, seeds {seeds}, {escape(record['device'])}."
        + (" **Interrupted: not all were tried.**" if record["partial"] else ""),
        *(("## Survivors", "\n".join(survivors)) if survivors else ()),
        *(("## Not found by the property that they name", "\n".join(unnamed)) if unnamed else ()),
        "## Found",
        table(("planted bug", "found by", *names), rows),
        cell,
        "## The bugs",
        table(("planted bug", "layer", "breaks", "what is wrong", "modelled on"), about),
        "## The same again",
        block(record["command"]),
        escape(record["summary"]["text"]) + ".",
    )
    return "\n\n".join(sections) + "\n"


def _cell(hunts: Sequence[Mapping[str, Any]]) -> str:
    if not hunts:
        return "-"
    killed = [one for one in hunts if one["by"] is not None]
    if not killed:
        return "SURVIVED"
    share = "" if len(killed) == len(hunts) else f"{len(killed)}/{len(hunts)} "
    shrunk = [one["operations"] for one in killed if one["operations"] is not None]
    told = f", {max(shrunk)} op" if shrunk else ""
    return f"{share}{max(one['after'] for one in killed)} p{told}"
