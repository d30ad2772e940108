"""``kv-harness wire-check``: does a worker speak the protocol?"""

from __future__ import annotations

import argparse
from typing import Any

from harness.commands import UsageError, limit_option


def register(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    check = commands.add_parser("wire-check", help="check that the worker which a command starts speaks the protocol")
    check.add_argument("worker", metavar="COMMAND", help="split as a shell would, run without one")
    limit_option(check)
    check.set_defaults(act=_check)


def _check(arguments: argparse.Namespace) -> int:
    from harness.wire.check import checks
    from harness.wire.process import WorkerError

    failed = 0
    try:
        for check in checks(arguments.worker, arguments.limit):
            print(f"{check.verdict:<5} {check.name}" + (f": {check.detail}" if check.detail else ""), flush=True)
            failed += check.verdict == "FAIL"
    except WorkerError as error:
        raise UsageError(f"wire:{arguments.worker!r:.120}: {error}") from error
    print(f"{failed} of the checks failed" if failed else "the worker speaks the protocol")
    return int(failed > 0)
