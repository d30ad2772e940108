"""The command line: ``kv-harness run | replay | families | properties``, and those of ``harness.commands``.

Exit codes everywhere: 0 clean, 1 findings (or vacuous under ``--strict``, or interrupted), 2 unusable input, with one
line on stderr that names it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

# A compiled function hides its calls from the probe, and compiling on the CPU costs seconds; before MLX is imported.
os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
# TF32 on a GPU is not float32; the comparisons assume that it is.
os.environ.setdefault("MLX_ENABLE_TF32", "0")
# The witness's matrices are small: threads that wait for each other cost half of the time where others work as well.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from harness import __version__
from harness.commands import (
    UsageError,
    checkpoint,
    doctor,
    explain,
    faults,
    limit_option,
    live_safety,
    museum,
    reference_targets,
    report,
    run,
    validate,
    wire,
)
from harness.terminal import INTERRUPTS, Output

CLEAN, FINDINGS, UNUSABLE = 0, 1, 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The argument parser of ``kv-harness``."""
    parser = _Parser(prog="kv-harness", description="Finds bugs in the KV cache and the attention masks of MLX models.")
    parser.add_argument("--version", action="version", version=f"kv-harness {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run.register(commands, _device_option)
    replay = commands.add_parser("replay", help="run the program of a trace file again: FIXED, FAILED or ERROR")
    replay.add_argument("file", type=Path)
    replay.add_argument(
        "--run-command",
        action="store_true",
        help="run the command that the file names, where its target is another process; without it nothing is run",
    )
    limit_option(replay)
    _device_option(replay)
    replay.set_defaults(act=_replay)

    families = commands.add_parser("families", help="list the families of a kind of target, and their variants")
    families.add_argument(
        "--kind", choices=("reference", "mlx_lm", "mlx_vlm"), default="reference", help="of target (default: reference)"
    )
    families.set_defaults(act=_families)
    properties = commands.add_parser("properties", help="list the properties and what makes a step decisive")
    properties.set_defaults(act=_properties)
    checkpoint.register(commands, _device_option)
    validate.register(commands, _device_option)
    faults.register(commands, _device_option)
    doctor.register(commands, _device_option)
    explain.register(commands)
    report.register(commands)
    wire.register(commands)
    live_safety.register(commands)
    museum.register(commands)
    return parser


def _device_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default=os.environ.get("KV_HARNESS_DEVICE") or None,
        help="default: $KV_HARNESS_DEVICE, or what MLX prefers",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    INTERRUPTS.install()  # a stopped job keeps what it measured, as Ctrl-C does
    output = Output()
    try:
        with contextlib.redirect_stdout(output):
            arguments = build_parser().parse_args(argv)
            code = int(arguments.act(arguments))
    except UsageError as error:
        code = _unusable(str(error))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = FINDINGS
    output.flush()
    if output.error is not None and not isinstance(output.error, BrokenPipeError):
        code = code or _unusable(f"cannot write to standard output: {output.error.strerror}")
    return code


def _unusable(message: str) -> int:
    print(f"kv-harness: error: {' '.join(message.split())}", file=sys.stderr)
    return UNUSABLE


def _replay(arguments: argparse.Namespace) -> int:
    from harness.replay import Outcome, replay
    from harness.targets import naming
    from harness.trace import TraceError, read_trace
    from harness.validation.judged import judgeable

    reference = reference_targets(arguments.device)
    try:
        trace = read_trace(arguments.file)
        asked = naming.Asked(limit=arguments.limit, run_command=arguments.run_command)
        target = naming.target_from_identity(trace.target, asked)
        try:
            result = replay(trace, target, judgeable(target))
        finally:
            target.renew()  # a worker ends with its replay
    except (TraceError, naming.TargetError, reference.UnknownFamily) as error:
        message = str(error)
        where = "" if message.startswith(str(arguments.file)) else f"{arguments.file}: "
        print(f"ERROR   {' '.join((where + message).split())}", file=sys.stderr)
        return UNUSABLE
    print(result.text(trace))
    return CLEAN if result.outcome is Outcome.FIXED else FINDINGS


def _families(arguments: argparse.Namespace) -> int:
    from tabulate import tabulate

    reference = reference_targets()
    if arguments.kind != "reference":
        from harness.targets import mlx_lm_catalogue, mlx_vlm_models

        catalogue = mlx_lm_catalogue if arguments.kind == "mlx_lm" else mlx_vlm_models
        told = {name: ", ".join(one.variant for one in entries) for name, entries in catalogue.FAMILIES.items()}
        told |= {name: f"cannot be judged: {why}" for name, why in catalogue.WITHOUT_ENTRY.items()}
        print(tabulate(sorted(told.items()), headers=["family", "variants"], tablefmt="simple"))
        return CLEAN
    rows = []
    for family in reference.FAMILIES:
        targets = reference.targets(family)
        variants = list(dict.fromkeys(target.variant.name for target in targets))
        storages = list(dict.fromkeys(target.storage for target in targets))
        rows.append([family, ", ".join(variants), ", ".join(storages), ", ".join(reference.paths(family))])
    headers = ["family", "variants", "caches", "paths"]
    print(
        tabulate(rows, headers=headers, tablefmt="simple", maxcolwidths=[None, 70, None, None], break_on_hyphens=False)
    )
    return CLEAN


def _properties(_: argparse.Namespace) -> int:
    import textwrap

    import properties

    for prop in properties.ALL:
        print(prop.id)
        print(textwrap.fill(prop.sentence, 110, initial_indent="    ", subsequent_indent="    "))
        print(textwrap.fill(f"decisive: {prop.decisive_when}", 110, initial_indent="    ", subsequent_indent="    "))
    return CLEAN


if __name__ == "__main__":
    sys.exit(main())
