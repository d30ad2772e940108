"""The harness judged by what it finds: every planted bug in every run where it can show, over several seeds."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import properties
from harness.campaign import CampaignResult, run_campaign, shares_of
from harness.faults import ALL_FAULTS, IMAGE_FAULTS, Fault
from harness.judging import Property
from harness.profiles import Profile
from harness.progress import check
from harness.reduction import ATTEMPTS
from harness.runner import family_targets, report_name
from harness.seeds import derive_seed
from harness.target import Path
from harness.targets import reference
from harness.terminal import INTERRUPTS
from harness.workers import Died, in_processes

_HUNTS = 12  # of a process, about: it takes as long as several of them to begin


class Lost(Exception):
    """A process died over its hunts; the message names the bug."""


@dataclass(frozen=True)
class Hunt:
    """One planted bug in one campaign with all properties.

    ``by``: the property that reported it first; None: it survived. ``named``: the property that the bug says it breaks
    finds it too, without the others. ``after``: programs, and ``seconds``, until it was
    first seen. ``operations``: of the shrunk ``program``; None: it was not shrunk. ``programs``: run in all.
    """

    fault: str
    run: str
    seed: int
    by: str | None
    after: int | None
    seconds: float | None
    operations: int | None
    program: str | None
    message: str | None
    programs: int
    named: bool = False

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def runs_of(fault: Fault, families: Sequence[str]) -> list[tuple[str, Path]]:
    """The (family, path) on which ``fault`` can show: its own path, and a model that has what it breaks."""
    return [
        (family, path)
        for family in families
        for path in reference.paths(family)
        if (path == "images" or fault not in IMAGE_FAULTS)
        and any(map(fault.shown_on, reference.targets(family, path=path, far=True)))
    ]


def hunt(
    fault: Fault,
    family: str,
    path: Path,
    profile: Profile,
    seed: int,
    first: bool = True,
) -> Hunt:
    """Plant it, run the ordinary campaign up to its first finding, and say what came of it.

    A finding that does not come back in a fresh model counts as none: nobody could replay it. KeyboardInterrupt after
    an interrupt, rather than a result that was cut short. ``first``: look for the smallest program that shows it, too,
    and ask all properties; otherwise they are asked only if the one that the bug names is blind alone.
    """
    name = report_name(family, path)
    quicker = dataclasses.replace(profile, shrink=False)  # our own reduction gets as far with bugs that are known

    def search(judges: Sequence[Property], attempts: int) -> CampaignResult:
        found = run_campaign(
            f"{name}_{fault.id}",
            targets,
            judges,
            quicker,
            own_seed,
            first_only=True,
            progress=lambda _: check(),
            shares=shares,
            attempts=attempts,
        )
        if found.partial and not found.found:
            raise KeyboardInterrupt
        return found

    with fault.plant():
        everything = family_targets(family, "live", profile, seed, path)
        # As many programs as these get beside all the others: what few configurations show is no easier to find here.
        shared = [
            (t, share) for t, share in zip(everything, shares_of(everything, profile), strict=True) if fault.shown_on(t)
        ]
        targets, shares = [t for t, _ in shared], [share for _, share in shared]
        own_seed = derive_seed(seed, fault.id)
        named = [properties.BY_ID[fault.breaks]] if fault.breaks else list(properties.ALL)
        if first:
            result = search(properties.ALL, ATTEMPTS)
            by = [bug.finding.property_id for bug in result.found if bug.reproducible]
            # Another property that reports it first may hide that this one is blind.
            alone = result if not by or by[0] == fault.breaks else search(named, 0)
        else:
            result = alone = search(named, 0)
            if not any(bug.reproducible for bug in alone.found):
                result = search(properties.ALL, 0)
    programs = result.tally.coverage.programs
    bug = next((bug for bug in result.found if bug.reproducible), None)
    if bug is None:
        return Hunt(fault.id, name, seed, None, None, None, None, None, None, programs)
    finding = bug.finding
    return Hunt(
        fault.id,
        name,
        seed,
        finding.property_id,
        bug.after,
        round(bug.seconds, 3),
        len(finding.program.operations) if first else None,
        str(finding.program),
        finding.message,
        programs,
        named=any(bug.reproducible for bug in alone.found),
    )


def hunt_all(
    faults: Sequence[Fault],
    families: Sequence[str],
    profile: Profile,
    seeds: Sequence[int],
    jobs: int = 1,
    device: str | None = None,
) -> Iterator[Hunt]:
    """Every fault, in every run where it can show, seed by seed; ``jobs`` processes at once. What the first seed finds
    is shrunk; the others only have to find it, and to find it again.

    KeyboardInterrupt after an interrupt, behind what was measured. Lost when a process died.
    """
    if jobs == 1:
        for seed in seeds:
            for fault in faults:
                yield from _hunts(fault, families, profile, seed, seed == seeds[0])
        return
    size = -(-_HUNTS // len(families))
    parts = [
        (seed, [fault.id for fault in faults[start : start + size]])
        for seed in seeds
        for start in range(0, len(faults), size)
    ]
    calls = [(hunts_of, (part, families, profile, seed, seed == seeds[0], device)) for seed, part in parts]
    for number, hunts in in_processes(calls, jobs):
        if not isinstance(hunts, Died):
            yield from hunts
        elif not INTERRUPTS.requested:
            raise Lost(f"the process that planted {', '.join(parts[number][1])} died ({hunts.how})")
    INTERRUPTS.check()


def hunts_of(
    faults: Sequence[str], families: Sequence[str], profile: Profile, seed: int, first: bool, device: str | None
) -> list[Hunt]:
    """Those of these faults, by their ids, in a process of their own; after an interrupt, those that were finished."""
    if device is not None:
        reference.use_device(device)
    by_id = {fault.id: fault for fault in ALL_FAULTS}
    found: list[Hunt] = []
    with contextlib.suppress(KeyboardInterrupt):
        for fault in faults:
            found.extend(_hunts(by_id[fault], families, profile, seed, first))
    return found


def _hunts(fault: Fault, families: Sequence[str], profile: Profile, seed: int, first: bool) -> Iterator[Hunt]:
    for family, path in runs_of(fault, families):
        yield hunt(fault, family, path, profile, seed, first)
        check()
