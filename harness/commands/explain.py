"""``kv-harness explain``: a trace, step by step, in plain words. It runs nothing."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from harness.commands import UsageError, file_to_write


def register(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    explain = commands.add_parser("explain", help="walk through a trace file step by step, in plain words")
    explain.add_argument("file", type=Path)
    explain.add_argument("--html", type=file_to_write, metavar="FILE", help="also as a page with pictures")
    explain.set_defaults(act=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    import properties
    from harness.reporting import html_page, pictures, write_atomically
    from harness.reporting.explanation import explanation
    from harness.reporting.text import block, escape
    from harness.trace import TraceError, read_trace

    if arguments.html is not None and arguments.html.resolve() == arguments.file.resolve():
        raise UsageError(f"argument --html: {arguments.html} is the trace itself")
    sentences = {prop.id: prop.sentence for prop in properties.ALL}
    try:
        trace = read_trace(arguments.file)
        options = " --run-command" if trace.target.get("command") is not None else ""
        text = explanation(trace, sentences, f"kv-harness replay {shlex.quote(str(arguments.file))}{options}")
    except TraceError as error:
        message = str(error)
        raise UsageError(
            message if message.startswith(str(arguments.file)) else f"{arguments.file}: {message}"
        ) from error
    print(text)
    if arguments.html is not None:
        markdown = f"# {escape(trace.file_name)}\n\n### 1. Pictures\n\n### 2. In words\n\n{block(text)}\n"
        try:
            write_atomically(arguments.html, html_page(markdown, {"1": pictures(trace)}))
        except OSError as error:
            raise UsageError(f"argument --html: {arguments.html}: {error.strerror or error}") from error
    return 0
