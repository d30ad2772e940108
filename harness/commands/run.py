"""``kv-harness run``: the main job, on families or on targets by their names, whole or in shards."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import re
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from harness.commands import UsageError, jobs_option, limit_option, out_option, reference_targets
from harness.profiles import PROFILES

if TYPE_CHECKING:
    from harness.profiles import Profile
    from harness.reporting.shards import Shard
    from harness.runner import Run

MOST_PROGRAMS = 10**8
"""Of ``run --programs``: more than a year of programs."""


def register(commands: Any, device_option: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to the subparsers of the command line."""
    run = commands.add_parser("run", help="draw programs, judge every property, write a report per family")
    run.add_argument("--families", "--family", metavar="A,B", help="comma-separated; default: all")
    run.add_argument(
        "--target",
        action="append",
        metavar="NAME,NAME",
        help="instead of families: reference:FAMILY[+images][:VARIANT[:STORAGE]], mlx_lm:TYPE, mlx_vlm:TYPE[+images], "
        "wire:COMMAND; mlx_lm:all, mlx_vlm:all for all of a catalogue; may be repeated",
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
    run.add_argument(
        "--shard",
        metavar="I/N",
        help="judge every Nth configuration of each family alone, from the Ith; kv-harness report puts shards together",
    )
    run.add_argument(
        "--part",
        metavar="I/N",
        help="run every Nth of the families or targets that are named, from the Ith; each has a report of its own",
    )
    run.add_argument(
        "--accept-known",
        action="store_true",
        help="findings that are recorded of the installed release are told, and fail nothing",
    )
    jobs_option(run)
    limit_option(run)
    device_option(run)
    run.set_defaults(act=act)


def act(arguments: argparse.Namespace) -> int:
    """Draw, judge and report; returns the exit code. UsageError for what cannot be used."""
    from harness.reporting.cut_off import forget
    from harness.runner import Run, run_families
    from harness.targets.naming import TargetError

    reference = reference_targets(arguments.device)
    profile = PROFILES[arguments.profile]
    seed = arguments.seed
    if seed is None:
        seed = secrets.randbelow(2**32) if profile.remember else 0
    if not 0 <= seed < 2**32:
        raise UsageError(f"argument --seed: must lie in [0, 2**32), got {seed}")
    shard = _shard(arguments, profile)
    base = Run(
        *("", "text", profile, seed, arguments.policy, arguments.out, arguments.device),
        limit=arguments.limit,
        shard=shard,
    )
    runs = _of_families(arguments, base, reference) if arguments.target is None else _of_targets(arguments, base)
    if arguments.programs is not None:
        if not 1 <= arguments.programs <= MOST_PROGRAMS:
            raise UsageError(f"argument --programs: must lie in [1, {MOST_PROGRAMS}], got {arguments.programs}")
        profile = dataclasses.replace(profile, programs=-(-arguments.programs // len(runs)), asked=True)
        runs = [dataclasses.replace(run, profile=profile) for run in runs]
    try:
        strict = profile.name != "smoke" if arguments.strict is None else arguments.strict
        options = {"jobs": arguments.jobs, "history": arguments.history, "accept_known": arguments.accept_known}
        return run_families(runs, strict=strict, **options)
    except TargetError as error:
        forget([run.out / run.report for run in runs])
        raise UsageError(str(error)) from error
    except OSError as error:
        where = error.filename or arguments.out
        raise UsageError(f"cannot write reports: {where}: {error.strerror or error}") from error


def _shard(arguments: argparse.Namespace, profile: Profile) -> Shard | None:
    from harness.reporting.shards import ShardError, shard_of

    if arguments.shard is None:
        return None
    if arguments.seed is None and profile.remember:
        raise UsageError("argument --shard: all shards need the same --seed; this profile would draw one for each")
    if arguments.history:
        raise UsageError("argument --history: belongs to kv-harness report, which puts the shards together")
    try:
        return shard_of(arguments.shard)
    except ShardError as error:
        raise UsageError(f"argument --shard: {error}") from error


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
    found = _part(arguments, found)
    return [dataclasses.replace(base, family=family, path=path) for family, path in found]


def _of_targets(arguments: argparse.Namespace, base: Run) -> list[Run]:
    """Each target is opened once: what cannot be used is refused before anything runs, or left out, and told, where
    nobody named it but as one of all."""
    from harness.runner import subject_of
    from harness.targets.naming import TargetError, listed, split_names

    if arguments.families is not None or arguments.path != "all":
        raise UsageError("argument --target: names all that is run; leave --families and --path out")
    names: dict[str, bool] = {}  # and: as one of all?
    try:
        for name in (name for given in arguments.target for name in split_names(given)):
            each = listed(name)
            names |= {one: bool(each) and names.get(one, True) for one in each or (name,)}
    except TargetError as error:
        raise UsageError(f"argument --target: {error}") from error
    if not names:
        raise UsageError("argument --target: names no target")
    runs: list[Run] = []
    for name in _part(arguments, list(names)):
        run = dataclasses.replace(base, target=name)
        try:
            with contextlib.closing(subject_of(run)) as subject:
                stem = subject.file_name
                number = 1 + sum(
                    run.stem == stem or bool(re.fullmatch(rf"{re.escape(stem)}-[0-9]+", run.stem)) for run in runs
                )
                stem += f"-{number}" if number > 1 else ""
                runs.append(dataclasses.replace(run, family=subject.family, path=subject.path, stem=stem))
        except TargetError as error:
            if not names[name]:
                raise UsageError(f"argument --target: {error}") from error
            print(f"{name}: not judged: {error}")
    if not runs:
        raise UsageError("argument --target: nothing that is named can be judged here")
    return runs


_Named = TypeVar("_Named")


def _part(arguments: argparse.Namespace, named: list[_Named]) -> list[_Named]:
    """Those of ``--part``. UsageError for none."""
    from harness.reporting.shards import ShardError, shard_of

    if arguments.part is None:
        return named
    try:
        mine = [named[number] for number in shard_of(arguments.part).of_these(len(named))]
    except ShardError as error:
        raise UsageError(f"argument --part: {error}") from error
    if not mine:
        raise UsageError(f"argument --part: {arguments.part} has nothing to run: {len(named)} are named")
    return mine
