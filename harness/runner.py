"""The main job: a campaign and its control for every family, findings and reports on disk, a summary at the end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import properties
from harness.campaign import CampaignResult, FoundBug, run_campaign, shares_of
from harness.execution import execute
from harness.faults import OFFSET_MASK_WITH_IMAGES
from harness.findings import Verdict
from harness.known import finding_text, known_of, unproved
from harness.profiles import Profile
from harness.progress import check, progress
from harness.recording import record
from harness.reporting import (
    check_writable,
    cut_off,
    family_markdown,
    family_record,
    record_text,
    summary_table,
    versions,
    write_atomically,
    write_pages,
)
from harness.reporting import history as past
from harness.reporting.shards import SHARDS, Shard
from harness.target import Path as TargetPath
from harness.target import Target
from harness.targets import naming, reference
from harness.terminal import INTERRUPTS
from harness.workers import Died, in_processes

DATABASE = Path(".hypothesis") / "kv-harness"
# Either of which the planted offset mask must break: a model that lays the mask over scores of its own raises in front
# of attention.
CONTROL = ("mask_key_axis_equals_live_keys", "every_operation_completes")

NO_CONTROL = "the target has no other mask policy, so that no bug could be planted in it"


@dataclass(frozen=True)
class Run:
    """One (family, path), and everything that decides what is measured of it. ``target``: its name, where it was named
    by ``--target``; its report then has the name ``stem``, and ``limit`` seconds are what its engine has to answer.
    ``shard``: which of its configurations are judged, where not all are."""

    family: str
    path: TargetPath
    profile: Profile
    seed: int
    policy: Literal["live", "offset"]
    out: Path
    device: str | None = None
    target: str | None = None
    stem: str = ""
    limit: float = naming.LIMIT
    shard: Shard | None = None

    @property
    def name(self) -> str:
        if self.target is not None:
            return self.stem
        return self.family if self.path == "text" else f"{self.family}+{self.path}"

    @property
    def report(self) -> Path:
        """Its report, in the folder of reports, without a suffix."""
        return self.whole if self.shard is None else Path(SHARDS) / self.whole / self.shard.file_name

    @property
    def whole(self) -> Path:
        """The report of all its shards."""
        other = "" if self.policy == "live" else f"@{self.policy}-mask"  # beside that of the right model, not over it
        name = self.stem if self.target is not None else report_name(self.family, self.path)
        return Path("families" if self.target is None else "targets") / f"{name}{other}"

    @property
    def command(self) -> str:
        """What does it again."""
        which = f"--families {self.family} --path {self.path}"
        if self.target is not None:
            which = f"--target {shlex.quote(self.target)}"
            which += "" if self.limit == naming.LIMIT else f" --limit {self.limit:g}"
        return (
            f"kv-harness run {which} --profile {self.profile.name} --seed {self.seed} --policy {self.policy}"
            + (f" --programs {self.profile.programs}" if self.profile.asked else "")
            + (f" --device {self.device}" if self.device else "")
            + (f" --shard {self.shard}" if self.shard else "")
        )


def run_families(
    runs: Sequence[Run], *, strict: bool, jobs: int = 1, history: bool = False, accept_known: bool = False
) -> int:
    """Measure every run, ``jobs`` of them at once, and write its report as soon as it is measured; returns the exit
    code. All have the same profile, seed, policy, device and folder. ``history``: also add a line for each to it.
    ``accept_known``: findings that are recorded of the installed release are told, and fail nothing.

    Raises OSError when the folder cannot be written (before anything is run, if that can be told).
    """
    first = runs[0]
    check_writable(first.out, [run.report for run in runs], (*cut_off.KINDS, cut_off.SUFFIX))
    print(
        f"kv-harness {versions()['kv-harness']}   profile {first.profile.name}, seed {first.seed}, "
        f"policy {first.policy}, {reference.device()}"
    )
    for line in cut_off.cut_off(first.out):
        print(line)
    files = {run.out / run.report: run.command for run in runs}
    cut_off.announce(files, first.profile.name, first.seed, first.policy)
    records: dict[int, dict[str, Any]] = {}
    bad = {Verdict.FAIL, Verdict.INCONCLUSIVE} | ({Verdict.VACUOUS} if strict else set())
    code = 0
    empty = 0
    for number, data in _one_by_one(runs) if jobs == 1 else in_processes([(measure, (run,)) for run in runs], jobs):
        name = runs[number].name
        if isinstance(data, Died):
            if INTERRUPTS.requested:
                print(f"interrupted in {name}; nothing of it was kept")
            else:
                print(f"error: {name}: its process died ({data.how}); run it again with --jobs 1", file=sys.stderr)
                code = 2
            continue
        if data is None:
            empty += 1
            print(f"{name:<20} {'-':<12} no configuration of it is in shard {runs[number].shard}", flush=True)
            continue
        records[number] = data
        for found in data["findings"]:
            print(finding_text(found))
        print(f"{name:<20} {data['verdict']:<12} {data['verdict_reason']}", flush=True)
        news = [found for found in data["findings"] if not (accept_known and found.get("known"))]  # KNOWN is a bug, too
        code = code or int(data["verdict"] in bad or data["partial"] or bool(news) or (strict and unproved(data)))
        if data["partial"]:
            print(f"interrupted in {name}; its report is marked partial")
    missing = [run.name for number, run in enumerate(runs) if number not in records]
    if empty == len(runs):
        print(f"nothing was judged: no configuration is in shard {first.shard}")
    if len(missing) > empty:
        print(f"not run: {', '.join(missing)}")
        code = code or 1
    print()
    print(summary_table([records[number] for number in sorted(records)]))
    if history:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        past.append(first.out / past.FILE, [past.entry(records[number], at) for number in sorted(records)])
    where = first.report.parent if first.shard is None else Path(SHARDS)
    print(f"\nreports in {first.out / where}")
    return code


def _one_by_one(runs: Sequence[Run]) -> Iterator[tuple[int, dict[str, Any] | None]]:
    for number, run in enumerate(runs):
        yield number, measure(run)
        if INTERRUPTS.requested:
            return


def measure(run: Run) -> dict[str, Any] | None:
    """Run the campaign and its control, write the report, and return its record; None where nothing of it is in the
    shard."""
    if run.device is not None:
        reference.use_device(run.device)
    profile = run.profile
    with closing(subject_of(run)) as subject:
        shares = shares_of(subject.targets, profile)
        mine = configurations_of(run, subject.targets)
        cut_off.begin(run.out / run.report, None if run.shard is None else run.out / run.whole)
        if not mine:
            cut_off.end(run.out / run.report)
            return None
        programs = sum(shares)
        far = sum(map(profile.far_of, shares))
        if profile.asked and programs > profile.programs + len(subject.targets):  # that is more than rounding up
            least = f"a configuration gets {profile.least} at least, a kind of caches {profile.of_a_kind}"
            beside = f" and {far} that are far from small" if far else ""
            print(f"{run.name}: {programs} programs{beside}, not {profile.programs}: {least}", file=sys.stderr)
        with progress(run.name, sum(shares[number] + profile.far_of(shares[number]) for number in mine)) as advance:
            result, control = judged(run, subject.targets, advance)
        with INTERRUPTS.deferred():
            return _write(run, subject, result, control)


def subject_of(run: Run) -> naming.Subject:
    """What the run judges. TargetError where there is no such thing."""
    name = run.target or f"{reference.KIND}:{run.family}" + ("" if run.path == "text" else f"+{run.path}")
    profile = run.profile
    asked = naming.Asked(run.policy, run.seed, profile.configurations, run.limit, far=bool(profile.far))
    return naming.resolve(name, asked)


def family_targets(
    family: str, policy: Literal["live", "offset"], profile: Profile, seed: int, path: TargetPath = "text"
) -> tuple[reference.ReferenceTarget, ...]:
    """What a run of the family judges: all that is built in, and the configurations that this seed draws."""
    found = subject_of(Run(family, path, profile, seed, policy, Path())).targets
    return tuple(target for target in found if isinstance(target, reference.ReferenceTarget))


def judged(
    run: Run, targets: Sequence[Target], advance: Callable[[int], None]
) -> tuple[CampaignResult, CampaignResult | None]:
    """The campaign on these targets, as far as they are in the shard, and on the planted bug; None where none can be
    planted, or after an interrupt. The planted bug is looked for on all of them in every shard: it is found soon."""
    profile, seed = run.profile, run.seed
    mine, shares = configurations_of(run, targets), shares_of(targets, profile)
    database = DATABASE if profile.remember else None
    name = run.stem or report_name(run.family, run.path)
    result = run_campaign(
        name,
        [targets[number] for number in mine],
        properties.ALL,
        profile,
        seed,
        database=database,
        progress=advance,
        shares=[shares[number] for number in mine],
        numbers=mine,
    )
    planted = _planted_in_models(run, targets)
    others = targets if planted else [other for each in targets if (other := each.counterpart())]
    if run.policy == "offset" or result.partial or len(others) < len(targets):
        return result, None
    with (OFFSET_MASK_WITH_IMAGES.plant if planted else nullcontext)():
        control = run_campaign(
            f"{name}_control",
            others,
            [properties.BY_ID[name] for name in CONTROL],
            profile,
            seed,
            progress=lambda _: check(),
            first_only=True,
        )
    if control.partial:
        result.partial = True
    return result, control


def _planted_in_models(run: Run, targets: Sequence[Target]) -> bool:
    """Is the control a bug in the reading of images, planted in the models of this repository? It would not be in those
    of others, nor in another process."""
    return run.path == "images" and all(each.identity.kind == reference.KIND for each in targets)


def configurations_of(run: Run, targets: Sequence[Target]) -> Sequence[int]:
    """The numbers of those that the run judges."""
    return range(len(targets)) if run.shard is None else run.shard.of_these(len(targets))


def _write(run: Run, subject: naming.Subject, result: CampaignResult, control: CampaignResult | None) -> dict[str, Any]:
    data = record_of(run, subject, result, control, write_findings(run, result), run.command)
    file = run.out / run.report.with_name(f"{run.report.name}.json")
    write_atomically(file, record_text(data))
    write_pages(file, family_markdown(data), data, run.out)
    cut_off.end(run.out / run.report)
    return data


def record_of(
    run: Run,
    subject: naming.Subject,
    result: CampaignResult,
    control: CampaignResult | None,
    replays: dict[str, str],
    command: str,
) -> dict[str, Any]:
    """The record of what was measured. ``replays``: of ``write_findings``; ``command``: what does it again."""
    alone = not _planted_in_models(run, subject.targets) and any(each.counterpart() is None for each in subject.targets)
    return family_record(
        result,
        family=subject.family,
        kind=subject.kind,
        policy=run.policy,
        path=run.path,
        configurations=[_configuration(target) for target in subject.targets],
        control=control,
        control_reason=NO_CONTROL if alone else None,
        device=subject.device,
        versions=versions(),
        command=command,
        replays=replays,
        limits=list(subject.limits),
        shard=run.shard,
        known=known_of,
    )


def _configuration(target: Target) -> dict[str, Any]:
    identity = target.identity
    named = {"variant": identity.variant, "storage": identity.storage, "drawn": identity.drawn is not None}
    return named | {"config": identity.detail.get("config", {}), "options": identity.detail.get("options", {})}


def report_name(family: str, path: TargetPath) -> str:
    """``qwen2_vl``, or ``qwen2_vl-images``: the path with images is a run of its own, with a report of its own."""
    return family if path == "text" else f"{family}-{path}"


def write_findings(run: Run, result: CampaignResult) -> dict[str, str]:
    """Write the trace of every finding; returns the commands that replay them, by property."""
    return {bug.finding.property_id: _write_finding(bug, run) for bug in result.found}


def _write_finding(bug: FoundBug, run: Run) -> str:
    trace = record(execute(bug.target, bug.finding.program), bug.finding, versions())
    path = run.out / "findings" / trace.file_name
    write_atomically(path, trace.to_text())
    options = " --run-command" if bug.target.identity.command is not None else ""
    options += "" if run.limit == naming.LIMIT else f" --limit {run.limit:g}"
    return f"kv-harness replay {shlex.quote(str(path))}{options}"
