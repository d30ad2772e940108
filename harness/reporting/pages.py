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

MOST_PICTURES = 240_000
"""Characters of all pictures of a page: it is to be read over a slow line, and sent by mail."""
_LEFT_OUT = "<p>A picture is left out here, it would make the page too large: kv-harness explain --html draws it.</p>"


def write_pages(record_file: Path, markdown: str, findings: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write them beside the record. ``findings``: of the record, in the order in which the Markdown numbers them; their
    traces lie in ``out``/findings, and where one does not, or there is no room, the page has a picture less."""
    room = MOST_PICTURES
    drawn: dict[str, list[str]] = {}
    for at, found in enumerate(findings, 1):
        placed = drawn[str(at)] = []
        for picture in _drawn(found.get("replay"), out):
            fits = len(picture) <= room // 2  # no large one takes the room of all that follow
            room -= len(picture) * fits
            placed.append(picture if fits else _LEFT_OUT)
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
