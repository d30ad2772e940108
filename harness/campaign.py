"""A campaign: many drawn programs on the targets of one family, until every property has its verdict."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import errors, reporting, seed
from hypothesis.stateful import run_state_machine_as_test

from harness.felt import unfelt
from harness.findings import Finding, FindingError, Verdict
from harness.judge import Listener
from harness.judging import Evidence, Judgement, Property
from harness.machines import make_machine
from harness.profiles import Profile
from harness.quantised import takes_affine
from harness.reduction import ATTEMPTS, reduce_finding
from harness.seeds import derive_seed
from harness.tally import PropertyTally, Tally, target_label
from harness.target import Capability, Target
from harness.turns import Turns


@dataclass(frozen=True)
class FoundBug:
    """A finding with the target that showed it. ``reproducible``: it came back in a target made new. ``after``: how
    many programs had run when it was first seen; ``seconds``: and how long the campaign had."""

    finding: Finding
    target: Target
    reproducible: bool
    after: int
    seconds: float = 0.0


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
    unfelt: dict[str, str] = field(default_factory=dict)  # of properties that could not have failed: why

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
        self.first_violation: dict[str, tuple[int, float]] = {}  # programs and the clock
        self.seen: Finding | None = None  # the shortest finding of the search in hand
        self.of: dict[str, Finding] = {}  # the shortest of each property on the target in hand

    def check(self) -> None:
        """Let the caller interrupt: its progress function may raise KeyboardInterrupt."""
        if self._progress is not None:
            self._progress(self.coverage.programs)

    def on_judgement(self, prop: Property, judgement: Judgement) -> None:
        super().on_judgement(prop, judgement)
        if judgement.violation is not None:
            self.first_violation.setdefault(prop.id, (self.coverage.programs + 1, time.perf_counter()))

    def on_finding(self, finding: Finding) -> None:
        length, known = len(finding.program.operations), self.of.get(finding.property_id)
        if self.seen is None or length <= len(self.seen.program.operations):
            self.seen = finding
        if known is None or length <= len(known.program.operations):
            self.of[finding.property_id] = finding

    def on_end(self, evidence: Evidence) -> None:
        super().on_end(evidence)
        if self._also is not None:
            self._also.on_end(evidence)
        self.check()


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
    shares: Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
    attempts: int = ATTEMPTS,
) -> CampaignResult:
    """Run ``profile.programs`` drawn programs, on every target its share; ``also`` is told of each that ended.

    The share is not left to the draw: Hypothesis likes to vary what it has just seen, and would leave some targets
    out.  After a finding its property is muted and the target gets another search, so that every property gets a
    verdict of its own however many bugs there are.  On every target programs that are far from small
    (``profile.far``) come behind, in proportion to its share.  While nothing is found, a target on which some
    property met no decisive step gets a few more (``profile.patience``) before that counts as VACUOUS.  ``first_only``
    stops at the first finding (a control needs no more).  ``shares``: programs on each target, and ``numbers`` of the
    targets, by which programs are drawn: where these are not all that a run would judge.  ``attempts``: smaller
    programs that are tried for each finding.  Ctrl-C ends the campaign and keeps what was measured (``partial``).
    """
    if not targets:
        raise ValueError(f"the campaign {name!r} has no target to run on")
    watcher = _Watcher(progress, also)
    result = CampaignResult(name, profile, base_seed, watcher)
    started = time.perf_counter()
    if shares is None:
        shares = shares_of(targets, profile)
    muted: set[str] = set()
    if numbers is None:
        numbers = range(len(targets))

    def keep(target: Target, finding: Finding, most: int = attempts) -> None:
        muted.add(finding.property_id)  # also when interrupted: what was found is not lost
        try:
            smaller, again = reduce_finding(target, finding, tuple(properties), most)
        except KeyboardInterrupt:
            smaller, again, result.partial = finding, True, True  # not tried: a replay may
        after, clock = watcher.first_violation[finding.property_id]
        found = dataclasses.replace(smaller, reproducible=again)
        result.found.append(FoundBug(found, target, again, after, clock - started))

    for number, target, share, far in _searches(numbers, targets, shares, profile):
        patience = 0 if far else profile.patience
        search = 0
        watcher.of.clear()
        while not result.partial:
            watcher.seen = None
            named, turns = f"{'Far' if far else 'Cache'}_{name}_{number}", Turns(1 if far else profile.every)
            machine = make_machine(named, target, properties, watcher, muted, turns, far=far)
            own = derive_seed(base_seed, name, number, search, *(["far"] if far else []))
            try:
                _search(seed(own)(machine), share, database)
                watcher.check()
            except KeyboardInterrupt:
                result.partial = True
            search += 1
            finding = watcher.seen
            if finding is not None:
                keep(target, finding)
            elif patience and not result.found and _undecided(watcher, target, properties, muted):
                patience -= 1
            else:
                break
            if finding is not None and first_only:
                break
        # A search that came to another finding behind it reports that one; what no later search met again is one, too.
        for finding in [] if first_only else list(watcher.of.values()):
            if finding.property_id not in muted:
                keep(target, finding, 0 if result.partial else attempts)
        if result.partial or (first_only and result.found):
            break
    if not result.partial and not first_only:
        try:
            for target in targets:
                _feel(result, target, properties)
                watcher.check()
        except KeyboardInterrupt:
            result.partial = True
    result.seconds = time.perf_counter() - started
    result.properties = [_result(prop, targets, result) for prop in properties]
    return result


def shares_of(targets: Sequence[Target], profile: Profile) -> tuple[int, ...]:
    """Programs on each of these targets when a run judges all of them, before anything is found, and beside those that
    are far from small; 0 for a target that is judged by these alone."""
    shares = iter(profile.shares([_kind(target) for target in targets if not is_far(target)]))
    return tuple(0 if is_far(target) else next(shares) for target in targets)


def is_far(target: Target) -> bool:
    """Is it for programs that are far from small alone? Such a target says so itself."""
    return bool(getattr(target, "far", False))


def _searches(
    numbers: Sequence[int], targets: Sequence[Target], shares: Sequence[int], profile: Profile
) -> Iterator[tuple[int, Target, Profile, bool]]:
    """Every target's number, what it is to be searched with, and whether programs are far from small: those come
    second, because they cost most."""
    for number, target, share in zip(numbers, targets, shares, strict=True):
        for far in (False, True):
            if programs := profile.far_of(share) if far else share:
                yield number, target, dataclasses.replace(profile, programs=programs), far


def _kind(target: Target) -> str:
    """Its storage, and whether programs can make an affine one of it: few variants have rows that are wide enough."""
    return f"{target.identity.storage}, wide" if takes_affine(target) else target.identity.storage


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


def _feel(result: CampaignResult, target: Target, properties: Sequence[Property]) -> None:
    """What a target said of its logits decides nothing where these depend on nothing: asked once, if anybody relies on
    it."""
    relying = [prop for prop in properties if prop.feels and _decisive_on(result.tally, prop, target)]
    lacks = unfelt(target) if relying else {}
    label = target_label(target)
    for prop in relying:
        if why := next((words for name, words in lacks.items() if name in prop.feels), None):
            result.tally.undecide(prop.id, label)
            result.unfelt[prop.id] = why


def _undecided(tally: Tally, target: Target, properties: Sequence[Property], muted: set[str]) -> bool:
    """Has some property that can judge this target met no decisive step on it yet?"""
    return any(
        not _decisive_on(tally, prop, target)
        for prop in properties
        if prop.id not in muted and prop.needs <= target.capabilities and prop.never_decisive(target) is None
    )


def _decisive_on(tally: Tally, prop: Property, target: Target) -> int:
    counted = tally.properties.get(prop.id)
    return 0 if counted is None else counted.by_target.get(target_label(target), 0)


_SEEN = frozenset({Capability.ATTENTION, Capability.POSITIONS})


def _result(prop: Property, targets: Sequence[Target], result: CampaignResult) -> PropertyResult:
    """The verdict. One configuration without a decisive step makes a property VACUOUS: no other speaks for it."""
    tally = result.tally.properties.get(prop.id, PropertyTally())
    if any(bug.finding.property_id == prop.id for bug in result.found):
        return PropertyResult(prop.id, Verdict.FAIL, tally)
    able = [target for target in targets if prop.needs <= target.capabilities]
    if not able:
        missing = {str(capability) for target in targets for capability in prop.needs - target.capabilities}
        reason = f"the target lacks: {', '.join(sorted(missing))}"
        return PropertyResult(prop.id, Verdict.NOT_APPLICABLE, tally, reason)
    if any(not is_far(target) for target in able):  # of few programs not every property meets something decisive
        able = [target for target in able if not is_far(target)]
    elif not tally.decisive_steps:
        return PropertyResult(prop.id, Verdict.NOT_APPLICABLE, tally, "of few, large programs none was decisive")
    never = {words for target in able if (words := prop.never_decisive(target)) is not None}
    able = [target for target in able if prop.never_decisive(target) is None]
    if not able:
        return PropertyResult(prop.id, Verdict.NOT_APPLICABLE, tally, "; ".join(sorted(never)))
    run = [target for target in able if result.tally.targets.get(target_label(target))]
    if tally.inconclusive:
        reason = f"{tally.inconclusive} programs did not repeat themselves, so the comparison says nothing"
        return PropertyResult(prop.id, Verdict.INCONCLUSIVE, tally, reason)
    if not tally.steps:
        reason = f"it met nothing that it could judge (decisive would be: {prop.decisive_when})"
        return PropertyResult(prop.id, Verdict.VACUOUS, tally, reason)
    empty = [target_label(target) for target in run if not _decisive_on(result.tally, prop, target)]
    if empty or not tally.decisive_steps:
        more = f"; {len(empty) - 3} more" if len(empty) > 3 else ""
        where = f" on {len(empty)} of {len(run)} configurations ({'; '.join(empty[:3])}{more})" if empty else ""
        why = result.unfelt.get(prop.id, f"decisive would be: {prop.decisive_when}")
        return PropertyResult(prop.id, Verdict.VACUOUS, tally, f"no decisive step{where}: {why}")
    blind = result.tally.coverage.blind_forwards
    if blind and prop.needs & _SEEN:
        reason = f"{blind} of {result.tally.coverage.forwards} forwards hid attention or position calls"
        return PropertyResult(prop.id, Verdict.INCONCLUSIVE, tally, reason)
    return PropertyResult(prop.id, Verdict.PASS, tally)
