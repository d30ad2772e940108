"""The page of a museum: which bugs of old releases were found, and whether the releases that mended them are clean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.reporting.text import Markdown, code, count, escape, table

SCHEMA, SCHEMA_VERSION = "kv-harness-museum", 1
COLUMNS = ("bug", "release", "family", "verdict", "found by", "after", "seconds", "shrunk to", "in all")


def museum_markdown(record: Mapping[str, Any]) -> str:
    """Of a record that ``kv-harness museum --out`` writes."""
    visits: Sequence[Mapping[str, Any]] = record["visits"]
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    how = (
        f"Profile {record['profile']}, seed {record['seed']}; {count(record['jobs'], 'campaign')} at once; harness on "
        f"{versions}; written {record['written']['at']}. Nobody told the campaigns what to look for: they are those of "
        "any target over the wire, in an environment of the release alone. A mended release is clean where its "
        "campaign shows that the bug is gone, and what it finds is explained by other known bugs of it (below)."
    )
    told = (
        "# Museum: known bugs of released engines",
        "",
        *(["**Interrupted:** what follows is a part.", ""] if record["partial"] else []),
        f"{record['summary']}.",
        "",
        how,
        "",
        f"`{record['command']}`",
        "",
        table(COLUMNS, [_cells(visit) for visit in visits], right=(6,)),
        "",
        "## Reports",
        "",
        *_reports(visits),
        *_beside(visits),
    )
    return "\n".join(told) + "\n"


def _cells(visit: Mapping[str, Any]) -> tuple[object, ...]:
    hit = visit["hit"]
    measured = f"{count(visit['programs'], 'program')}, {visit['seconds']:.0f} s"
    named = (visit["bug"], f"{visit['package']} {visit['version']}", visit["family"], visit["verdict"])
    if hit is None:
        return (*named, "", "", "", "", measured)
    shrunk = Markdown(f"{count(hit['operations'], 'operation')}: {code(hit['program']).replace('|', chr(92) + '|')}")
    return (*named, hit["property"], count(hit["after"], "program"), f"{hit['seconds']:.1f}", shrunk, measured)


def _reports(visits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for bug, report in dict.fromkeys((visit["bug"], visit["report"]) for visit in visits):
        repository, _, number = report.partition("#")
        yield f"- {bug}: [{report}](https://github.com/{repository}/issues/{number})"


def _beside(visits: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What a campaign found that is not the bug: in an old release other bugs, in a mended one those that are known,
    and why."""
    old: list[str] = []
    mended: list[str] = []
    for visit in visits:
        for one in visit["found"]:
            if visit["hit"] is not None and all(one[name] == value for name, value in visit["hit"].items()):
                continue
            where = f"{visit['package']} {visit['version']}, {visit['family']}"
            line = f"- {where}: {one['property']} ({code(one['program'])})"
            if "why" in one:
                mended.append(f"{line}: {escape(one['why'] or 'nothing that is known explains it')}")
            else:
                old.append(line)
    if mended:
        yield from ("", "## Found in mended releases: other bugs", "", *dict.fromkeys(mended))
    if old:
        yield from ("", "## Found beside the bug in old releases", "", *dict.fromkeys(old))
