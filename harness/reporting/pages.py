"""The pages of a record: Markdown, and HTML with the pictures of its findings."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness.reporting.files import write_atomically
from harness.reporting.html import html_page
from harness.reporting.pictures import pictures
from harness.trace import TraceError, read_trace


def write_pages(record_file: Path, markdown: str, findings: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write them beside the record. ``findings``: of the record, in the order in which the Markdown numbers them; their
    traces lie in ``out``/findings, and where one does not, the page has a picture less."""
    drawn = {str(at): _drawn(found.get("replay"), out) for at, found in enumerate(findings, 1)}
    write_atomically(record_file.with_name(f"{record_file.stem}.md"), markdown)
    write_atomically(record_file.with_name(f"{record_file.stem}.html"), html_page(markdown, drawn))


def _drawn(replay: str | None, out: Path) -> list[str]:
    """``replay``: the command, ``kv-harness replay FILE ...``."""
    try:
        words = shlex.split(replay or "")
        if len(words) < 3:
            return []
        return pictures(read_trace(out / "findings" / Path(words[2]).name))
    except (TraceError, ValueError):  # also a quote that nobody closed
        return []
