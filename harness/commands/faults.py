"""``kv-harness faults``: does the harness find what it must? Exit code 1 if a planted bug survives, or is
not found by the property that it names."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from harness.commands import UsageError, jobs_option, out_option
from harness.profiles import PROFILES


def register(commands: Any, device_option: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to the subparsers of the command line."""
    faults = commands.add_parser("faults", help="plant every known bug in every family and see which are found")
    faults.add_argument("--families", "--family", metavar="A,B", help="comma-separated; default: all")
    faults.add_argument("--only", metavar="ID,ID", help="planted bugs, comma-separated; default: all")
    faults.add_argument("--list", action="store_true", help="list the planted bugs, and plant none")
    faults.add_argument("--seeds", type=int, default=1, metavar="N", help="how many seeds (default: 1)")
    faults.add_argument("--seed", type=int, default=0, metavar="S", help="the first of them (default: 0)")
    faults.add_argument("--profile", choices=list(PROFILES), default="quick", help="budget (default: quick)")
    out_option(faults)
    jobs_option(faults)
    device_option(faults)
    faults.set_defaults(act=_faults)


def _faults(arguments: argparse.Namespace) -> int:
    try:
        from harness import detection
        from harness.faults import ALL_FAULTS
        from harness.targets import reference
    except ImportError as error:
        raise UsageError(f"MLX cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'") from error
    from harness.progress import SILENCE
    from harness.reporting import versions
    from harness.reporting.kill_matrix import matrix_record, write_matrix
    from harness.reporting.sources import OURS
    from harness.terminal import INTERRUPTS

    if arguments.device is not None:
        try:
            reference.use_device(arguments.device)
        except reference.TargetError as error:
            raise UsageError(f"argument --device: {error}") from error
    if not 1 <= arguments.seeds <= 1000:
        raise UsageError(f"argument --seeds: must lie in [1, 1000], got {arguments.seeds}")
    if not 0 <= arguments.seed < 2**32:
        raise UsageError(f"argument --seed: must lie in [0, 2^32), got {arguments.seed}")
    families = _chosen("--families", arguments.families, list(reference.FAMILIES))
    by_id = {fault.id: fault for fault in ALL_FAULTS}
    faults = [by_id[name] for name in _chosen("--only", arguments.only, list(by_id))]
    if arguments.list:
        for fault in faults:
            print(f"{fault.id}   [{fault.layer}; {fault.breaks}]\n    {fault.summary}")
            print(f"    {'modelled on ' + fault.source if fault.source else OURS}")
        return 0
    folder = arguments.out / "faults"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write reports: {folder}: {error.strerror or error}") from error

    profile, seeds = PROFILES[arguments.profile], range(arguments.seed, arguments.seed + arguments.seeds)

    said = time.monotonic()

    def told(one: Any) -> None:
        nonlocal said
        if one.by is None:
            print(f"SURVIVED  {one.fault} in {one.run}, seed {one.seed}: {one.programs} programs", flush=True)
        elif not one.named:
            print(f"UNNAMED   {one.fault} in {one.run}, seed {one.seed}: only {one.by} finds it", flush=True)
        elif sys.stderr.isatty():
            print(f"found     {one.fault} in {one.run}, seed {one.seed}", file=sys.stderr)
        if not sys.stderr.isatty() and time.monotonic() - said >= SILENCE:  # hours may pass without a survivor
            said = time.monotonic()
            print(f"{len(hunts)} hunts, the last with seed {one.seed}", file=sys.stderr, flush=True)

    hunts: list[Any] = []
    partial = lost = False
    try:
        for one in detection.hunt_all(faults, families, profile, seeds, arguments.jobs, arguments.device):
            hunts.append(one)
            told(one)
    except KeyboardInterrupt:  # what was measured is not lost
        partial = True
    except detection.Lost as error:
        print(f"error: {error}", file=sys.stderr)
        partial = lost = True
    if not hunts:
        if lost:
            return 2
        if partial:
            raise KeyboardInterrupt
        raise UsageError(f"argument --only: none of these bugs can show in {', '.join(families)}")
    order = {fault.id: number for number, fault in enumerate(faults)}
    hunts.sort(key=lambda one: (order[one.fault], one.seed))  # they come as they end
    command = f"kv-harness faults --families {','.join(families)} --profile {profile.name} --seeds {arguments.seeds}"
    command += f" --seed {arguments.seed}" if arguments.seed else ""
    command += f" --only {','.join(fault.id for fault in faults)}" if arguments.only else ""
    record = matrix_record(
        [one.to_json() for one in hunts],
        faults={
            f.id: {"summary": f.summary, "layer": f.layer, "breaks": f.breaks, "source": f.source or OURS}
            for f in faults
        },
        profile=profile.name,
        seeds=list(seeds),
        versions=versions(),
        device=reference.device(),
        command=command,
        partial=partial,
    )
    try:
        with INTERRUPTS.deferred():
            write_matrix(folder, record)
    except OSError as error:
        raise UsageError(f"cannot write reports: {folder}: {error.strerror or error}") from error
    print(f"kill matrix in {folder / 'kill-matrix.md'}")
    print(("incomplete; " if lost else "interrupted; " if partial else "") + record["summary"]["text"])
    return int(partial or record["summary"]["named"] < record["summary"]["hunts"])


def _chosen(option: str, given: str | None, known: list[str]) -> list[str]:
    """The names given, in their order; UsageError for one that is not known."""
    import difflib

    if given is None:
        return known
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    if not names:
        raise UsageError(f"argument {option}: names nothing")
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3) or known[:5]
            raise UsageError(f"argument {option}: unknown {name!r:.60}; nearest: {', '.join(near)}")
    return names
