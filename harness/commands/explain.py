"""``kv-harness explain``: a trace, step by step, in plain words. It runs nothing."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import Any

from harness.commands import UsageError


def register(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    explain = commands.add_parser("explain", help="walk through a trace file step by step, in plain words")
    explain.add_argument("file", type=Path)
    explain.set_defaults(act=_explain)


def _explain(arguments: argparse.Namespace) -> int:
    import properties
    from harness.reporting.explanation import explanation
    from harness.trace import TraceError, read_trace

    sentences = {prop.id: prop.sentence for prop in properties.ALL}
    try:
        trace = read_trace(arguments.file)
        print(explanation(trace, sentences, f"kv-harness replay {shlex.quote(str(arguments.file))}"))
    except TraceError as error:
        message = str(error)
        raise UsageError(
            message if message.startswith(str(arguments.file)) else f"{arguments.file}: {message}"
        ) from error
    return 0
