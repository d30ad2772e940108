"""The Python interface: ``verify(target)`` is one ``kv-harness run``, as an object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from harness.campaign import FoundBug
from harness.findings import Verdict
from harness.known import finding_text
from harness.profiles import PROFILES
from harness.progress import check
from harness.reporting import family_markdown
from harness.runner import Run, judged, record_of, subject_of, write_findings
from harness.target import Target
from harness.targets import naming


@dataclasses.dataclass(frozen=True)
class Report:
    """What a run found.

    ``record``: as in the JSON reports (``harness/reporting/schema``); ``found``: the findings, with the targets that
    showed them.
    """

    record: dict[str, Any]
    found: tuple[FoundBug, ...]

    @property
    def verdict(self) -> Verdict:
        """Of the whole: PASS only if every property had a decisive step on every configuration."""
        return Verdict(self.record["verdict"])

    @property
    def properties(self) -> dict[str, Verdict]:
        """The verdict of every property, by its id."""
        return {row["id"]: Verdict(row["verdict"]) for row in self.record["properties"]}

    @property
    def text(self) -> str:
        """The verdict in one line, then every finding with its program."""
        line = f"{self.record['target']}: {self.record['verdict']}: {self.record['verdict_reason']}"
        return "\n".join([line, *map(finding_text, self.record["findings"])])

    @property
    def markdown(self) -> str:
        """The whole report."""
        return family_markdown(self.record)

    def check(self, strict: bool = True) -> None:
        """AssertionError with the text unless the verdict is PASS; VACUOUS passes where not ``strict``."""
        good = {Verdict.PASS} if strict else {Verdict.PASS, Verdict.VACUOUS}
        if self.verdict not in good:
            raise AssertionError(self.text)


def verify(
    target: str | Target | Sequence[Target],
    profile: str = "quick",
    *,
    seed: int = 0,
    programs: int | None = None,
    out: Path | str = "reports",
    policy: Literal["live", "offset"] = "live",
    limit: float = naming.LIMIT,
) -> Report:
    """Draw programs and judge every property that can judge the target; then look for the planted bug in its
    counterpart, if it has one.

    ``target``: a name as ``kv-harness run --target`` takes it, or an object with the interface of
    ``harness.target.Target``, or several configurations of one. ``programs``: instead of the profile's number.
    Findings are written into ``out``/findings, for ``kv-harness replay``; nothing is written if there is none.
    ``policy``: where the masks of a target that is named take their width from (``offset`` is the historic bug);
    ``limit``: seconds that an engine in another process has for an answer, five times that for its start. An object has
    its own of both.

    ValueError: no such target, profile, policy or number of programs. KeyboardInterrupt after Ctrl-C.
    """
    if profile not in PROFILES:
        raise ValueError(f"a profile is one of {', '.join(PROFILES)}, not {profile!r:.60}")
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise ValueError(f"a seed must be a whole number in [0, 2**32), got {seed!r:.40}")
    if programs is not None and programs < 1:
        raise ValueError(f"programs must be at least 1, got {programs}")
    if policy not in ("live", "offset"):
        raise ValueError(f"a policy is live or offset, not {policy!r:.40}")
    if isinstance(limit, bool) or not isinstance(limit, (int, float)) or not 0 < limit <= naming.MOST:
        raise ValueError(f"a limit must lie in (0, {naming.MOST:g}] seconds, got {limit!r:.40}")
    if not isinstance(target, str) and (policy, limit) != ("live", naming.LIMIT):
        raise ValueError("policy and limit are of a target that is named; an object has its own")
    chosen = PROFILES[profile]
    if programs is not None:
        chosen = dataclasses.replace(chosen, programs=programs, asked=True)
    name = target if isinstance(target, str) else None
    run = Run("", "text", chosen, seed, policy, Path(out), target=name, limit=limit)
    with closing(subject_of(run) if isinstance(target, str) else _subject(target)) as subject:
        run = dataclasses.replace(run, family=subject.family, path=subject.path, stem=subject.file_name)
        result, control = judged(run, subject.targets, lambda _: check())
        if result.partial:
            raise KeyboardInterrupt
        replays = write_findings(run, result)
        again = run.command if isinstance(target, str) else f"verify(..., {profile!r}, seed={seed})"
        record = record_of(run, subject, result, control, replays, again)
    return Report(record, tuple(result.found))


def _subject(target: Target | Sequence[Target]) -> naming.Subject:
    """The configurations as they are, under the name of the first."""
    targets = tuple(target) if isinstance(target, Sequence) else (target,)
    if not targets:
        raise ValueError("no target was given")
    if odd := [each for each in targets if not hasattr(each, "identity")]:
        raise ValueError(f"no target: {odd[0]!r:.80} (see harness.target.Target)")
    first = targets[0].identity
    for other in targets[1:]:
        if (other.identity.kind, other.identity.family) != (first.kind, first.family):
            told = f"not {first.family} and {other.identity.family}"
            raise ValueError(f"configurations of one target are judged together, {told}")
    return naming.Subject(first.kind, first.family, targets, "as the target computes", path=first.path)
