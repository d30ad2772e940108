"""``kv-harness museum``: does an ordinary campaign find the bugs that released engines are known to have had, and
nothing in the releases that mended them?"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.commands import UsageError, jobs_option, limit_option
from harness.museum import Exhibit, ManifestError, exhibits
from harness.museum.environments import NoEnvironment, environment
from harness.profiles import PROFILES
from harness.reporting import check_writable, record_text, versions, write_atomically
from harness.reporting.museum import SCHEMA, SCHEMA_VERSION, museum_markdown
from harness.seeds import derive_seed
from harness.terminal import INTERRUPTS
from harness.workers import Died, in_processes

_AGAIN = 2  # further seeds for a release in which another bug hides what is to be shown
COLUMNS = ("bug", "release", "family", "verdict", "property", "after", "seconds", "program", "beside it")


@dataclasses.dataclass(frozen=True)
class Seen:
    """A finding: ``after`` so many programs and ``seconds``, with the shrunk ``program``."""

    property: str
    message: str
    after: int
    seconds: float
    operations: int
    program: str


@dataclasses.dataclass(frozen=True)
class Visit:
    """A campaign on a release. ``programs``, ``seconds``: it had in all; ``shown``: properties that passed."""

    exhibit: Exhibit
    version: str
    family: str
    programs: int
    seconds: float
    found: tuple[Seen, ...]
    shown: frozenset[str]

    @property
    def mended(self) -> bool:
        """Is it of the release without the bug?"""
        return self.version == self.exhibit.fixed

    @property
    def hit(self) -> Seen | None:
        """The finding that is the bug: of one of its properties, in its words."""
        expected = self.exhibit.expected
        return next((one for one in self.found if one.property in expected and self.exhibit.says in one.message), None)

    @property
    def odd(self) -> tuple[Seen, ...]:
        """Findings of a mended release that no other known bug explains: by family, property, message and program."""
        return tuple(one for one in self.found if one is self.hit or self._explained(one) is None)

    def _explained(self, one: Seen) -> str | None:
        """Which other known bug of a mended release it is, in the words of the manifest."""
        told = self.family, one.property, one.message, one.program
        return next((other.why for other in self.exhibit.others if other.explains(*told)), None)

    @property
    def good(self) -> bool:
        """Is it as the manifest says? A mended release must also have given a property of the bug something to see."""
        if not self.mended:
            return self.hit is not None
        return not self.odd and any(name in self.shown for name in self.exhibit.expected)

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if not self.mended:
            return "found" if self.hit else "MISSED"
        return "clean" if self.good else "NOT CLEAN" if self.odd else "NOT SHOWN"

    def cells(self) -> tuple[str, ...]:
        """As COLUMNS."""
        named = (self.exhibit.name, f"{self.exhibit.package} {self.version}", self.family, self.verdict)
        one = self.hit or next(iter(self.odd), None)
        beside = ", ".join(each.property for each in self.found if each is not one)
        if one is None or (self.mended and self.good):
            return (*named, "", f"{self.programs} programs", f"{self.seconds:.0f}", "", beside)
        program = f"{one.operations} operations: `{one.program}`"
        return (*named, one.property, f"{one.after} programs", f"{one.seconds:.0f}", program, beside)

    def to_json(self) -> dict[str, Any]:
        found = [dataclasses.asdict(one) | ({"why": self._explained(one)} if self.mended else {}) for one in self.found]
        hit = None if (self.mended and self.good) else self.hit or next(iter(self.odd), None)
        named = {"bug": self.exhibit.name, "report": self.exhibit.report, "package": self.exhibit.package}
        measured = {"programs": self.programs, "seconds": round(self.seconds, 1), "found": found}
        measured["hit"] = None if hit is None else dataclasses.asdict(hit)
        return {**named, "version": self.version, "family": self.family, "verdict": self.verdict, **measured}


def visits(
    chosen: Iterable[Exhibit], venvs: Path, profile: str, seed: int, limit: float, jobs: int = 1
) -> Iterator[Visit]:
    """One for every release and family, as they are done: one by one, each environment made when it is its turn; or
    ``jobs`` at once, when all environments are there. Raises NoEnvironment, TargetError, and KeyboardInterrupt behind
    what was measured."""
    asked = [(one, version) for one in chosen for version in (*one.buggy, one.fixed)]
    made = (
        (exhibit, version, family, environment(venvs / f"{exhibit.package}-{version}", exhibit.installs(version)))
        for exhibit, version in asked
        for family in exhibit.families
    )
    calls = ((_visit, (*each, profile, seed, limit)) for each in made)
    if jobs == 1:
        yield from (function(*arguments) for function, arguments in calls)
        return
    from harness.targets.naming import TargetError

    several = list(calls)
    for number, visit in in_processes(several, jobs):
        if isinstance(visit, Died):
            exhibit, version, family, *_ = several[number][1]
            raise TargetError(f"the process that judged {exhibit.package} {version}, {family}, died ({visit.how})")
        yield visit
    INTERRUPTS.check()


def _visit(exhibit: Exhibit, version: str, family: str, python: Path, profile: str, seed: int, limit: float) -> Visit:
    """Where another bug of a mended release got in the way of what was to be shown, other seeds get a try."""
    for own in (seed, *(derive_seed(seed, "again", number) for number in range(_AGAIN))):
        visit = _visit_once(exhibit, version, family, python, profile, own, limit)
        if visit.verdict != "NOT SHOWN":
            break
    return visit


def _visit_once(
    exhibit: Exhibit, version: str, family: str, python: Path, profile: str, seed: int, limit: float
) -> Visit:
    import properties
    from harness.campaign import run_campaign
    from harness.findings import Verdict
    from harness.progress import check
    from harness.targets.naming import Asked, resolve

    command = shlex.join((str(python), "-m", "harness.wire.worker", f"{exhibit.kind}:{family}"))
    with closing(resolve(f"wire:{command}", Asked(seed=seed, limit=limit))) as subject:
        name = f"wire-{subject.family}"
        result = run_campaign(
            name, subject.targets, properties.ALL, PROFILES[profile], seed, progress=lambda _: check()
        )
    if result.partial:
        raise KeyboardInterrupt
    found = tuple(
        Seen(
            bug.finding.property_id,
            bug.finding.message,
            bug.after,
            round(bug.seconds, 1),
            len(bug.finding.program.operations),
            str(bug.finding.program),
        )
        for bug in result.found
    )
    shown = frozenset(each.id for each in result.properties if each.verdict is Verdict.PASS)
    return Visit(exhibit, version, family, result.tally.coverage.programs, result.seconds, found, shown)


def register(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    museum = commands.add_parser("museum", help="are the bugs of old releases found, and the mended releases clean?")
    museum.add_argument("--only", metavar="NAME,NAME", help="bugs, comma-separated; default: all")
    museum.add_argument("--list", action="store_true", help="list the bugs, and run nothing")
    museum.add_argument(
        "--venvs",
        type=Path,
        default=Path(".museum"),
        metavar="DIR",
        help="where each release has its virtual environment, made with pip where it is missing (default: .museum)",
    )
    museum.add_argument("--profile", choices=list(PROFILES), default="quick", help="budget (default: quick)")
    museum.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    museum.add_argument("--out", type=Path, metavar="DIR", help="write museum.md and museum.json there, too")
    jobs_option(museum)
    limit_option(museum)
    museum.set_defaults(act=_museum)


def _museum(arguments: argparse.Namespace) -> int:
    from harness.targets.naming import TargetError

    try:
        chosen = _chosen(arguments.only, exhibits())
    except ManifestError as error:
        raise UsageError(f"the manifest of the museum: {error}") from error
    if not 0 <= arguments.seed < 2**32:
        raise UsageError(f"argument --seed: must lie in [0, 2**32), got {arguments.seed}")
    if arguments.list:
        for one in chosen:
            releases = f"{one.package} {', '.join(one.buggy)}; mended in {one.fixed}"
            print(f"{one.name}   [{one.report}; {releases}]\n    {', '.join(one.families)}: {', '.join(one.expected)}")
        return 0
    if arguments.out is not None:  # a folder that cannot be written is told of before anything runs
        _write(arguments.out, None)
    seen: list[Visit] = []
    whole = False
    started = time.monotonic()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    asked = (arguments.venvs, arguments.profile, arguments.seed, arguments.limit, arguments.jobs)
    try:
        for visit in visits(chosen, *asked):
            seen.append(visit)
            print(f"| {' | '.join(visit.cells())} |", flush=True)
        whole = True
    except KeyboardInterrupt:  # what was measured is not lost
        pass
    except (NoEnvironment, TargetError) as error:
        raise UsageError(str(error)) from error
    finally:  # nor is it by a release that cannot be installed
        if arguments.out is not None and seen:
            _write(arguments.out, _record(arguments, chosen, seen, whole, time.monotonic() - started))
    print(f"\n{'' if whole else 'interrupted; '}{_summary(seen)}")
    return int(not whole or not all(visit.good for visit in seen))


def _record(
    arguments: argparse.Namespace, chosen: Sequence[Exhibit], seen: Sequence[Visit], whole: bool, seconds: float
) -> dict[str, Any]:
    """In the order of the manifest, whichever was done first."""
    order = [
        (one.name, version, family) for one in chosen for version in (*one.buggy, one.fixed) for family in one.families
    ]
    told = sorted(seen, key=lambda visit: order.index((visit.exhibit.name, visit.version, visit.family)))
    only = [] if arguments.only is None else ["--only", ",".join(one.name for one in chosen)]
    numbers = ["--profile", arguments.profile, "--seed", str(arguments.seed)]
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "profile": arguments.profile,
        "seed": arguments.seed,
        "jobs": arguments.jobs,
        "versions": versions(),
        "command": shlex.join(["kv-harness", "museum", *only, *numbers]),
        "partial": not whole,
        "summary": _summary(told),
        "visits": [visit.to_json() for visit in told],
        "written": {"at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(seconds, 1)},
    }


def _write(out: Path, record: dict[str, Any] | None) -> None:
    """None: is it possible?"""
    try:
        if record is None:
            check_writable(out, [Path("museum")], ("json", "md"))
            return
        write_atomically(out / "museum.json", record_text(record))
        write_atomically(out / "museum.md", museum_markdown(record))
    except OSError as error:
        raise UsageError(f"cannot write reports: {error.filename or out}: {error.strerror or error}") from error


def _summary(seen: Sequence[Visit]) -> str:
    old, mended = [one for one in seen if not one.mended], [one for one in seen if one.mended]
    found, clean = (sum(one.good for one in group) for group in (old, mended))
    return f"{found} of {len(old)} old releases: the bug was found; {clean} of {len(mended)} mended ones: clean"


def _chosen(given: str | None, known: Sequence[Exhibit]) -> list[Exhibit]:
    """Those whose names are given; UsageError for one that is not known."""
    if given is None:
        return list(known)
    names = list(dict.fromkeys(name.strip() for name in given.split(",") if name.strip()))
    by_name = {one.name: one for one in known}
    if odd := [name for name in names if name not in by_name]:
        raise UsageError(f"argument --only: no bug {odd[0]!r:.60}; there are {', '.join(by_name)}")
    if not names:
        raise UsageError("argument --only: names no bug")
    return [by_name[name] for name in names]
