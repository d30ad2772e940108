"""What is not PASS in a folder of reports, as the text of an issue: every finding with its program and its replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from harness.findings import NOT_AGAIN
from harness.reporting.text import block, code, count

MOST = 60_000  # characters; GitHub takes 65,536
_GONE = 50


def issue_markdown(records: Sequence[Mapping[str, Any]], gone: Sequence[str] = ()) -> str:
    """Empty where there is no news, and nothing is ``gone``, targets without a report. No news is a PASS, what is
    recorded of a release (KNOWN), and an engine of others on which something met no decisive step: the same every
    night, and nobody here can mend it. What would make it too long is left out, and counted. What a record says is in
    code: a name in it calls nobody, and a number links nowhere."""
    bad = [record for record in records if _is_news(record)]
    if not bad and not gone:
        return ""
    parts = [f"{count(len(bad), 'report')} of {len(records):,} {'is' if len(bad) == 1 else 'are'} not PASS."]
    if gone:
        more = f" and {len(gone) - _GONE:,} more" if len(gone) > _GONE else ""
        names = ", ".join(code(f"{name:.200}") for name in gone[:_GONE])
        parts.append(f"No report, though history knows them: {names}{more}.")
    if quiet := Counter(record["verdict"] for record in records if record not in bad and record["verdict"] != "PASS"):
        told = ", ".join(f"{number:,} {verdict}" for verdict, number in sorted(quiet.items()))
        parts.append(f"Of engines of others, and no news: {told}.")
    left, room = 0, MOST - sum(map(len, parts)) - 100
    for record in bad:
        for part in (_heading(record), *map(_finding, record["findings"])):
            if len(part) + 2 > room:
                left, room = left + 1, 0  # nothing behind it either: what is there should be whole
                continue
            parts.append(part)
            room -= len(part) + 2
    if left:
        parts.append(f"{count(left, 'section')} more: see the reports of the run.")
    return "\n\n".join(parts) + "\n"


def _is_news(record: Mapping[str, Any]) -> bool:
    ours = record["target"].startswith("reference:")
    return record["verdict"] not in ("PASS", "KNOWN", *(() if ours else ("VACUOUS",)))


def _heading(record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("kv-harness", "mlx", "platform"))
    return (
        f"## {code(record['target'])}: {record['verdict']}\n\n{code(record['verdict_reason'])}\n\n"
        f"{code(versions)}, {code(record['device'])}\n\n{block(record['command'])}"
    )


def _finding(found: Mapping[str, Any]) -> str:
    known = found.get("known")
    told = [f"known     {known['id']}: {known['title']} {known['upstream']}".rstrip()] if known else []
    again = [] if found["reproducible"] else [NOT_AGAIN.strip()]
    said = (found["message"], *told, f"program   {found['program']}", *again, f"replay    {found['replay']}")
    return f"### {code(found['property'])}\n\n{code(found['target'])}\n\n{block(chr(10).join(said))}"
