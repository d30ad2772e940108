"""The command line: ``kv-harness run | replay | families | properties``, and those of ``harness.commands``.

Exit codes everywhere: 0 clean, 1 findings (or vacuous under ``--strict``, or interrupted), 2 unusable input, with one
line on stderr that names it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
    jobs_option,
    limit_option,
    live_safety,
    museum,
    out_option,
    report,
    validate,
    wire,
)
from harness.profiles import PROFILES
from harness.terminal import INTERRUPTS, Output

if TYPE_CHECKING:
    from harness.runner import Run

CLEAN, FINDINGS, UNUSABLE = 0, 1, 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")


MOST_PROGRAMS = 10**8
"""Of ``run --programs``: more than a year of programs."""


def build_parser() -> argparse.ArgumentParser:
    """The argument parser of ``kv-harness``."""
    parser = _Parser(prog="kv-harness", description="Finds bugs in the KV cache and the attention masks of MLX models.")
    parser.add_argument("--version", action="version", version=f"kv-harness {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="draw programs, judge every property, write a report per family")
    run.add_argument("--families", metavar="A,B", help="comma-separated; default: all")
    run.add_argument(
        "--target",
        action="append",
        metavar="NAME,NAME",
        help="instead of families: reference:FAMILY[+images][:VARIANT[:STORAGE]], mlx_lm:TYPE, mlx_vlm:TYPE[+images], "
        "wire:COMMAND; may be repeated",
    )
    run.add_argument(
        "--path",
        choices=("all", "text", "images"),
        default="all",
        help="what prompts hold; each path has a report of its own (default: all that a family has)",
    )
    run.add_argument("--profile", choices=list(PROFILES), default="quick", help="budget (default: quick)")
    run.add_argument(
        "--programs",
        type=int,
        metavar="N",
        help="programs in all, shared evenly; each configuration gets a few, however small N is",
    )
    run.add_argument("--seed", type=int, metavar="N", help="default: 0; nightly: a new one every time")
    run.add_argument("--policy", choices=("live", "offset"), default="live", help="where masks take their width from")
    out_option(run)
    run.add_argument(
        "--strict",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="a property without a decisive step fails the run (default, but of smoke, which is too small)",
    )
    run.add_argument("--history", action="store_true", help="add a line for every report to DIR/history.jsonl")
    jobs_option(run)
    limit_option(run)
    _device_option(run)
    run.set_defaults(act=_run)

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

    families = commands.add_parser("families", help="list the reference families and their variants")
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


def _run(arguments: argparse.Namespace) -> int:
    from harness.runner import Run, run_families
    from harness.targets.naming import TargetError

    reference = _reference(arguments.device)
    profile = PROFILES[arguments.profile]
    seed = arguments.seed
    if seed is None:
        seed = secrets.randbelow(2**32) if profile.remember else 0
    if not 0 <= seed < 2**32:
        raise UsageError(f"argument --seed: must lie in [0, 2**32), got {seed}")
    base = Run("", "text", profile, seed, arguments.policy, arguments.out, arguments.device, limit=arguments.limit)
    runs = _of_families(arguments, base, reference) if arguments.target is None else _of_targets(arguments, base)
    if arguments.programs is not None:
        if not 1 <= arguments.programs <= MOST_PROGRAMS:
            raise UsageError(f"argument --programs: must lie in [1, {MOST_PROGRAMS}], got {arguments.programs}")
        profile = dataclasses.replace(profile, programs=-(-arguments.programs // len(runs)), asked=True)
        runs = [dataclasses.replace(run, profile=profile) for run in runs]
    try:
        strict = profile.name != "smoke" if arguments.strict is None else arguments.strict
        return run_families(runs, strict=strict, jobs=arguments.jobs, history=arguments.history)
    except TargetError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        where = error.filename or arguments.out
        raise UsageError(f"cannot write reports: {where}: {error.strerror or error}") from error


def _of_families(arguments: argparse.Namespace, base: Run, reference: Any) -> list[Run]:
    names = reference.FAMILIES
    if arguments.families is not None:
        names = tuple(dict.fromkeys(name.strip() for name in arguments.families.split(",") if name.strip()))
        if not names:
            raise UsageError("argument --families: names no family")
    try:
        found = [(name, path) for name in names for path in reference.paths(name) if arguments.path in ("all", path)]
    except reference.UnknownFamily as error:
        raise UsageError(str(error)) from error
    if not found:
        raise UsageError(f"argument --path: no {arguments.path} for {', '.join(names)}: no model with a vision tower")
    return [dataclasses.replace(base, family=family, path=path) for family, path in found]


def _of_targets(arguments: argparse.Namespace, base: Run) -> list[Run]:
    """Each target is opened once: what cannot be used is refused before anything runs."""
    from harness.runner import subject_of
    from harness.targets.naming import TargetError, split_names

    if arguments.families is not None or arguments.path != "all":
        raise UsageError("argument --target: names all that is run; leave --families and --path out")
    names = dict.fromkeys(name for given in arguments.target for name in split_names(given))
    if not names:
        raise UsageError("argument --target: names no target")
    runs: list[Run] = []
    for name in names:
        run = dataclasses.replace(base, target=name)
        try:
            with contextlib.closing(subject_of(run)) as subject:
                stem, number = subject.file_name, 1 + sum(run.stem.startswith(subject.file_name) for run in runs)
                stem += f"-{number}" if number > 1 else ""
                runs.append(dataclasses.replace(run, family=subject.family, path=subject.path, stem=stem))
        except TargetError as error:
            raise UsageError(f"argument --target: {error}") from error
    return runs


def _replay(arguments: argparse.Namespace) -> int:
    from harness.replay import Outcome, replay
    from harness.targets import naming
    from harness.trace import TraceError, read_trace
    from harness.validation.judged import judgeable

    reference = _reference(arguments.device)
    try:
        trace = read_trace(arguments.file)
        asked = naming.Asked(limit=arguments.limit, run_command=arguments.run_command)
        target = naming.target_from_identity(trace.target, asked)
        result = replay(trace, target, judgeable(target))
    except (TraceError, naming.TargetError, reference.UnknownFamily) as error:
        message = str(error)
        where = "" if message.startswith(str(arguments.file)) else f"{arguments.file}: "
        print(f"ERROR   {' '.join((where + message).split())}", file=sys.stderr)
        return UNUSABLE
    print(result.text(trace))
    return CLEAN if result.outcome is Outcome.FIXED else FINDINGS


def _families(_: argparse.Namespace) -> int:
    from tabulate import tabulate

    reference = _reference()
    rows = []
    for family in reference.FAMILIES:
        targets = reference.targets(family)
        variants = list(dict.fromkeys(target.variant.name for target in targets))
        storages = list(dict.fromkeys(target.storage for target in targets))
        rows.append([family, ", ".join(variants), ", ".join(storages), ", ".join(reference.paths(family))])
    headers = ["family", "variants", "caches", "paths"]
    print(tabulate(rows, headers=headers, tablefmt="simple", maxcolwidths=[None, 70, None, None]))
    return CLEAN


def _properties(_: argparse.Namespace) -> int:
    import textwrap

    import properties

    for prop in properties.ALL:
        print(prop.id)
        print(textwrap.fill(prop.sentence, 110, initial_indent="    ", subsequent_indent="    "))
        print(textwrap.fill(f"decisive: {prop.decisive_when}", 110, initial_indent="    ", subsequent_indent="    "))
    return CLEAN


def _reference(device: str | None = None) -> Any:
    """The reference target, on ``device`` if one is named; MLX is only loaded when a command needs it."""
    try:
        from harness.targets import reference
    except ImportError as error:
        raise UsageError(f"MLX cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'") from error
    if device is not None:
        try:
            reference.use_device(device)
        except reference.TargetError as error:
            raise UsageError(f"argument --device: {error}") from error
    return reference


if __name__ == "__main__":
    sys.exit(main())
