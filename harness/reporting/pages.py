"""The pages of a record: Markdown, and HTML with the pictures of its findings."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from harness.reporting.checkpoint import MASKS
from harness.reporting.files import write_atomically
from harness.reporting.html import html_page
from harness.reporting.masks import side_masks
from harness.reporting.pictures import pictures
from harness.trace import TraceError, read_trace

MOST_PICTURES = 240_000
"""Characters of all pictures of a page: it is to be read over a slow line, and sent by mail."""
_LEFT_OUT = "<p>A picture is left out here, it would make the page too large: kv-harness explain --html draws it.</p>"


def write_pages(record_file: Path, markdown: str, record: Mapping[str, Any], out: Path) -> None:
    """Write them beside the record. The Markdown numbers its findings; their traces lie in ``out``/findings, and where
    one does not, or there is no room, the page has a picture less. The masks of the sides of a checkpoint's validation
    are in the record itself."""
    room = MOST_PICTURES

    def placed(pictures: Iterable[str]) -> Iterator[str]:
        nonlocal room
        for picture in pictures:
            fits = len(picture) <= room // 2  # no large one takes the room of all that follow
            room -= len(picture) * fits
            yield picture if fits else _LEFT_OUT

    drawn = {MASKS: list(placed(side_masks(record)))}
    for at, found in enumerate(record["findings"], 1):
        drawn[str(at)] = list(placed(_drawn(found.get("replay"), out)))
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
