"""What is not PASS in a folder of reports, as the text of an issue: every finding with its program and its replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.reporting.text import block, count, escape

MOST = 60_000  # characters; GitHub takes 65,536


def issue_markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """Empty where all is PASS. What would make it too long is left out, and counted."""
    bad = [record for record in records if record["verdict"] != "PASS"]
    if not bad:
        return ""
    parts = [f"{count(len(bad), 'report')} of {len(records):,} {'is' if len(bad) == 1 else 'are'} not PASS."]
    left, room = 0, MOST - len(parts[0]) - 100
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


def _heading(record: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("kv-harness", "mlx", "platform"))
    return (
        f"## {escape(record['target'])}: {record['verdict']}\n\n{escape(record['verdict_reason'])}\n\n"
        f"{escape(versions)}, {escape(record['device'])}\n\n{block(record['command'])}"
    )


def _finding(found: Mapping[str, Any]) -> str:
    said = (found["message"], f"program   {found['program']}", f"replay    {found['replay']}")
    return f"### {escape(found['property'])}\n\n{escape(found['target'])}\n\n{block(chr(10).join(said))}"
