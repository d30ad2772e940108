"""A campaign: many drawn programs on the targets of one family, until every property has its verdict."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import errors, reporting, seed
from hypothesis.stateful import run_state_machine_as_test

from harness.findings import Finding, FindingError, Verdict
from harness.judge import Listener
from harness.judging import Evidence, Judgement, Property
from harness.machine import make_machine
from harness.profiles import Profile
from harness.reduction import reduce_finding
from harness.tally import PropertyTally, Tally
from harness.target import Target


@dataclass(frozen=True)
class FoundBug:
    """A finding with the target that showed it. ``reproducible``: it came back in a fresh session. ``after``: how many
    programs had run when it was first seen."""

    finding: Finding
    target: Target
    reproducible: bool
    after: int


@dataclass(frozen=True)
class PropertyResult:
    """One row of a report."""

    id: str
    verdict: Verdict
    tally: PropertyTally
    reason: str | None = None


@dataclass
class CampaignResult:
    """Everything a campaign measured. ``partial``: it was interrupted."""

    name: str
    profile: Profile
    seed: int
    tally: Tally
    properties: list[PropertyResult] = field(default_factory=list)
    found: list[FoundBug] = field(default_factory=list)
    seconds: float = 0.0
    partial: bool = False

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of its properties."""
        verdicts = {result.verdict for result in self.properties}
        for worst in (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.VACUOUS):
            if worst in verdicts:
                return worst
        return Verdict.PASS if Verdict.PASS in verdicts else Verdict.VACUOUS


class _Watcher(Tally):
    """A Tally that also says how far the campaign is, and remembers what was found."""

    def __init__(self, progress: Callable[[int], None] | None, also: Listener | None) -> None:
        super().__init__()
        self._progress = progress
        self._also = also
        self.first_violation: dict[str, int] = {}
        self.seen: Finding | None = None  # the shortest finding of the search in hand

    def on_judgement(self, prop: Property, judgement: Judgement) -> None:
        super().on_judgement(prop, judgement)
        if judgement.violation is not None:
            self.first_violation.setdefault(prop.id, self.coverage.programs + 1)

    def on_finding(self, finding: Finding) -> None:
        if self.seen is None or len(finding.program.operations) <= len(self.seen.program.operations):
            self.seen = finding

    def on_end(self, evidence: Evidence) -> None:
        super().on_end(evidence)
        if self._also is not None:
            self._also.on_end(evidence)
        if self._progress is not None:
            self._progress(self.coverage.programs)


def derive_seed(base: int, *names: object) -> int:
    """A seed of its own for every family and round: with one seed for all, all would run the same programs."""
    text = "\0".join(str(part) for part in (base, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def run_campaign(
    name: str,
    targets: Sequence[Target],
    properties: Sequence[Property],
    profile: Profile,
    base_seed: int,
    *,
    database: Path | None = None,
    progress: Callable[[int], None] | None = None,
    first_only: bool = False,
    also: Listener | None = None,
) -> CampaignResult:
    """Run ``profile.programs`` drawn programs, an equal share on every target; ``also`` is told of each that ended.

    The share is not left to the draw: Hypothesis likes to vary what it has just seen, and would leave some targets
    out.  After a finding its property is muted and the target gets another search, so that every property gets a
    verdict of its own however many bugs there are.  ``first_only`` stops at the first finding (a control needs no
    more).  Ctrl-C ends the campaign and keeps what was measured (``partial``).
    """
    if not targets:
        raise ValueError(f"the campaign {name!r} has no target to run on")
    watcher = _Watcher(progress, also)
    result = CampaignResult(name, profile, base_seed, watcher)
    started = time.perf_counter()
    share = dataclasses.replace(profile, programs=-(-profile.programs // len(targets)))
    waiting = list(enumerate(targets))
    muted: set[str] = set()
    while waiting and not result.partial:
        number, target = waiting[0]
        watcher.seen = None
        machine = make_machine(f"Cache_{name}_{number}", target, properties, watcher, muted)
        try:
            _search(seed(derive_seed(base_seed, name, number, len(muted)))(machine), share, database)
        except KeyboardInterrupt:
            result.partial = True
        finding = watcher.seen
        if finding is None:
            waiting.pop(0)
            continue
        muted.add(finding.property_id)  # also when interrupted: what was found is not lost
        try:
            smaller, again = reduce_finding(target, finding, tuple(properties))
        except KeyboardInterrupt:
            smaller, again, result.partial = finding, True, True
        result.found.append(FoundBug(smaller, target, again, watcher.first_violation[finding.property_id]))
        if first_only:
            break
    result.seconds = time.perf_counter() - started
    result.properties = [_result(prop, targets, result) for prop in properties]
    return result


def _search(machine: type, profile: Profile, database: Path | None) -> None:
    """One Hypothesis run until its budget is spent or a finding is shrunk; the watcher has seen what it found."""
    try:
        with reporting.with_reporter(lambda _: None):  # what it would print, our reports say better
            run_state_machine_as_test(machine, settings=profile.settings(database))
    except FindingError:
        pass
    except errors.Flaky as error:  # it failed, and then it did not: the program alone does not decide
        if not _holds_finding(error):
            raise


def _holds_finding(error: BaseException) -> bool:
    """Is a FindingError among what a Flaky error was made of?"""
    waiting: list[BaseException | None] = [error]
    known: set[int] = set()
    while waiting:
        current = waiting.pop()
        if current is None or id(current) in known:
            continue
        known.add(id(current))
        if isinstance(current, FindingError):
            return True
        if isinstance(current, BaseExceptionGroup):
            waiting.extend(current.exceptions)
        waiting.extend((current.__cause__, current.__context__))
    return False


def _result(prop: Property, targets: Sequence[Target], result: CampaignResult) -> PropertyResult:
    tally = result.tally.properties.get(prop.id, PropertyTally())
    missing = set[str]()
    for target in targets:
        missing |= {str(capability) for capability in prop.needs - target.capabilities}
    if any(bug.finding.property_id == prop.id for bug in result.found):
        return PropertyResult(prop.id, Verdict.FAIL, tally)
    if missing and not tally.steps:
        return PropertyResult(prop.id, Verdict.NOT_APPLICABLE, tally, f"the target lacks: {', '.join(sorted(missing))}")
    if tally.inconclusive:
        reason = f"{tally.inconclusive} programs did not repeat themselves, so the comparison says nothing"
        return PropertyResult(prop.id, Verdict.INCONCLUSIVE, tally, reason)
    if not tally.decisive_steps:
        return PropertyResult(prop.id, Verdict.VACUOUS, tally, f"no decisive step: it needs {prop.decisive_when}")
    return PropertyResult(prop.id, Verdict.PASS, tally)
