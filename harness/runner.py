"""The main job: a campaign and its control for every family, findings and reports on disk, a summary at the end."""

from __future__ import annotations

import errno
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import properties
from harness.campaign import CampaignResult, FoundBug, derive_seed, run_campaign
from harness.execution import execute
from harness.faults import OFFSET_MASK_WITH_IMAGES
from harness.findings import Verdict
from harness.profiles import Profile
from harness.recording import record
from harness.reporting import (
    family_markdown,
    family_record,
    record_text,
    summary_table,
    versions,
    write_atomically,
)
from harness.target import Path as TargetPath
from harness.targets import reference
from harness.terminal import INTERRUPTS

DATABASE = Path(".hypothesis") / "kv-harness"
SILENCE = 30.0  # seconds after which a run without a terminal says how far it is
CONTROL = "mask_key_axis_equals_live_keys"  # the property that the planted offset-mask bug must break


def run_families(
    runs: Sequence[tuple[str, TargetPath]],
    *,
    profile: Profile,
    seed: int,
    policy: Literal["live", "offset"],
    out: Path,
    strict: bool,
    device: str | None = None,
) -> int:
    """Run every (family, path) and write its report as soon as it is measured; returns the exit code.

    Raises OSError when ``out`` cannot be written (before anything is run, if that can be told).
    """
    _check_writable(out, [report_name(family, path) for family, path in runs])
    used = versions()
    print(
        f"kv-harness {used['kv-harness']}   profile {profile.name}, seed {seed}, policy {policy}, {reference.device()}"
    )
    records: list[dict[str, Any]] = []
    code = 0
    for family, path in runs:
        name = family if path == "text" else f"{family}+{path}"
        targets = family_targets(family, policy, profile, seed, path)
        with _progress(name, profile.share(len(targets)) * len(targets)) as advance:
            result, control = _measure(family, path, targets, profile, seed, policy, advance)
        command = (
            f"kv-harness run --families {family} --path {path} --profile {profile.name} --seed {seed} "
            f"--policy {policy}"
            + (f" --programs {profile.programs}" if profile.asked else "")
            + (f" --device {device}" if device else "")
        )
        with INTERRUPTS.deferred():
            data = _write(family, path, targets, policy, result, control, used, out, command)
        records.append(data)
        for found in data["findings"]:
            print(_finding_text(found))
        print(f"{name:<20} {data['verdict']:<12} {data['verdict_reason']}", flush=True)
        bad = {Verdict.FAIL, Verdict.INCONCLUSIVE} | ({Verdict.VACUOUS} if strict else set())
        code |= data["verdict"] in bad or data["partial"]
        if data["partial"]:
            print(f"interrupted in {name}; its report is marked partial, later ones were not run")
            break
        if INTERRUPTS.requested:  # while the report was written
            print(f"interrupted after {name}; later ones were not run")
            code = True
            break
    print()
    print(summary_table(records))
    print(f"\nreports in {out / 'families'}")
    return int(code)


def family_targets(
    family: str, policy: Literal["live", "offset"], profile: Profile, seed: int, path: TargetPath = "text"
) -> tuple[reference.ReferenceTarget, ...]:
    """What a run of the family judges: all that is built in, and the configurations that this seed draws."""
    numbers = derive_seed(seed, family, path, "configurations")
    drawn = reference.drawn_variants(family, numbers, profile.configurations, images=path == "images")
    return reference.targets(family, policy, seed, path, drawn)


def _measure(
    family: str,
    path: TargetPath,
    targets: Sequence[reference.ReferenceTarget],
    profile: Profile,
    seed: int,
    policy: Literal["live", "offset"],
    advance: Callable[[int], None],
) -> tuple[CampaignResult, CampaignResult | None]:
    database = DATABASE if profile.remember else None
    name = report_name(family, path)
    result = run_campaign(name, targets, properties.ALL, profile, seed, database=database, progress=advance)
    if policy == "offset" or result.partial:
        return result, None
    with (OFFSET_MASK_WITH_IMAGES.plant if path == "images" else nullcontext)():
        control = run_campaign(
            f"{name}_control",
            family_targets(family, "live" if path == "images" else "offset", profile, seed, path),
            [properties.BY_ID[CONTROL]],
            profile,
            seed,
            progress=lambda _: INTERRUPTS.check(),
            first_only=True,
        )
    if control.partial:
        result.partial = True
    return result, control


def _write(
    family: str,
    path: TargetPath,
    targets: Sequence[reference.ReferenceTarget],
    policy: str,
    result: CampaignResult,
    control: CampaignResult | None,
    used: dict[str, str],
    out: Path,
    command: str,
) -> dict[str, Any]:
    replays = {bug.finding.property_id: _write_finding(bug, used, out) for bug in result.found}
    data = family_record(
        result,
        family=family,
        policy=policy,
        path=path,
        configurations=[
            {
                "variant": target.variant.name,
                "storage": target.storage,
                "drawn": target.variant.drawn,
                **target.describe(),
            }
            for target in targets
        ],
        control=control,
        device=reference.device(),
        versions=used,
        command=command,
        replays=replays,
        limits=list(reference.limits(family, path)),
    )
    stem = out / "families" / report_name(family, path)
    write_atomically(stem.with_suffix(".json"), record_text(data))
    write_atomically(stem.with_suffix(".md"), family_markdown(data))
    return data


def report_name(family: str, path: TargetPath) -> str:
    """``qwen2_vl``, or ``qwen2_vl-images``: the path with images is a run of its own, with a report of its own."""
    return family if path == "text" else f"{family}-{path}"


def _write_finding(bug: FoundBug, used: dict[str, str], out: Path) -> str:
    """Write the trace of a finding; returns the command that replays it."""
    trace = record(execute(bug.target, bug.finding.program), bug.finding, used)
    path = out / "findings" / trace.file_name
    write_atomically(path, trace.to_text())
    return f"kv-harness replay {shlex.quote(str(path))}"


def _finding_text(found: dict[str, Any]) -> str:
    return (
        f"FAIL  {found['property']}   {found['target']}\n      {found['message']}\n"
        f"      program   {found['program']}\n      replay    {found['replay']}"
    )


def _check_writable(out: Path, names: Sequence[str]) -> None:
    """Find out now, not after the first report, that reports cannot be written."""
    try:
        str(out).encode("utf-8")
    except UnicodeEncodeError as error:
        raise OSError(errno.EILSEQ, "the name of the folder is not UTF-8", repr(str(out))) from error
    for folder in (out / "families", out / "findings"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    for name in (f"{name}.{kind}" for name in names for kind in ("json", "md")):
        if (out / "families" / name).is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder, a report would go there", str(out / "families" / name))


@contextmanager
def _progress(name: str, programs: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal, else a line every half minute. Findings lead to further programs, so
    the total may grow."""
    if not sys.stderr.isatty():
        said = time.monotonic()

        def say(done: int) -> None:
            nonlocal said
            INTERRUPTS.check()
            if time.monotonic() - said >= SILENCE:
                said = time.monotonic()
                print(f"{name}: {done} of {max(programs, done)} programs", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=programs)

        def advance(done: int) -> None:
            INTERRUPTS.check()
            bar.update(task, completed=done, total=max(programs, done))

        yield advance
