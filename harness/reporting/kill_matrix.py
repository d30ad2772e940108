"""The kill matrix: planted bugs by runs, as Markdown and as a record."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.reporting.text import block, count, escape, table

SCHEMA = "kv-harness-kill-matrix"
SCHEMA_VERSION = 1


def matrix_record(
    hunts: Sequence[Mapping[str, Any]],
    *,
    faults: Mapping[str, Mapping[str, Any]],
    summary: Mapping[str, Any],
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
        "summary": dict(summary),
    }


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
        (name, fault["layer"], fault["breaks"], fault["summary"], fault["source"] or "-")
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
