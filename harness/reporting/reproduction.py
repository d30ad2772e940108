"""What a reader of a pasted report needs to see a finding again: its trace, in the page itself."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from harness.reporting.text import CLOSE, OPEN, block, escape

MOST = 6_000
"""Characters of a trace that a page shows: GitHub takes 65,536 of a comment, and there may be a dozen findings."""
FILE = "trace.json"
_NEEDED = {
    "wire": "It runs the command that the file names.",
    "checkpoint": "The checkpoint must lie where the file says, with the same fingerprint.",
}


def reproduction(found: Mapping[str, Any]) -> str:
    """A block that folds, in Markdown, of a finding of a record. "" where the record is older than these."""
    trace = found.get("trace")
    if trace is None:
        return ""
    text = trace_text(trace)
    try:
        words = shlex.split(found.get("replay") or "")
    except ValueError:  # a quote that nobody closed
        words = []
    if len(text) > MOST:
        where = f"; it is in {words[2]}" if len(words) > 2 else ""
        told = f"The trace has {len(text):,} characters, too many for a page{escape(where)}."
        return f"{OPEN}\n\n{told}\n\n{CLOSE}"
    again = shlex.join(["kv-harness", "replay", FILE, *words[3:]])
    target = trace["target"]
    needed = _NEEDED.get("checkpoint" if "checkpoint" in target else target["kind"], "It needs no other file.")
    told = f"Save this as {FILE}; FAILED says that the bug is still there. {needed}"
    return f"{OPEN}\n\n{told}\n\n{block(text, 'json')}\n\n{block(again)}\n\n{CLOSE}"


def trace_text(trace: Mapping[str, Any]) -> str:
    """A field on each line: short, and still to be read."""
    fields = (f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in trace.items())
    return "{" + ",\n ".join(fields) + "}"
