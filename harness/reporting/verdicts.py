"""The verdict of a family, and the one line that says why."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.findings import Verdict
from harness.reporting.text import count

if TYPE_CHECKING:  # at run time it would import Hypothesis, and a report is also written from a record alone
    from harness.campaign import CampaignResult, FoundBug

PLANTED_POLICY = "offset"
"""The mask policy of the control: the bug that every run must be able to find."""
NAMED = 3
"""Properties that a verdict names where nothing but the budget was too small."""
UNCHECKED = "no planted bug was looked for, and what the logits must be, nothing but the target says"
"""Of a PASS that neither a control nor a reference stands behind."""
_REFERENCES = ("outputs_equal_the_witness", "outputs_equal_the_cache_free_forward")
WORST = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.KNOWN, Verdict.VACUOUS, Verdict.PASS)


def planted_bug(result: CampaignResult, control: CampaignResult) -> FoundBug | None:
    """The finding that shows that the harness caught the planted bug.

    It must come back in a fresh session, and the run itself must not break the same property: otherwise it
    may be a bug of the target that has nothing to do with the planted one.
    """
    broken = {bug.finding.property_id for bug in result.found}
    for bug in control.found:
        if bug.reproducible and bug.finding.property_id not in broken:
            return bug
    return None


@dataclass(frozen=True)
class Outcome:
    """What a verdict is made of, of a campaign or of the records of its shards.

    ``properties``: id, verdict and decisive steps of each; ``first_after``: programs until the first finding; ``cut``:
    why not all of the run was done, in words; ``control``: the same of the planted bug (``first_after`` None: not
    caught), and None where there was none. ``profile``: its name; what smoke leaves open a larger one may settle.
    """

    policy: str
    properties: Sequence[tuple[str, Verdict, int]]
    programs: int
    first_after: int | None = None
    cut: str | None = None
    control: Outcome | None = None
    profile: str = ""

    @property
    def worst(self) -> Verdict:
        """Of its properties."""
        met = {verdict for _, verdict, _ in self.properties}
        return next((verdict for verdict in WORST if verdict in met), Verdict.VACUOUS)


Known = Mapping[str, str]
"""Of a finding that is recorded: ``id`` and ``title`` of the record, ``upstream``, and ``matched`` (by what)."""


def with_known(result: CampaignResult, known: Callable[[FoundBug], Known | None]) -> CampaignResult:
    """The result with KNOWN for every property of which each finding is recorded: one that is not keeps it FAIL."""
    told: dict[str, list[Known | None]] = {}
    for bug in result.found:
        told.setdefault(bug.finding.property_id, []).append(known(bug))
    recorded = {name: [one for one in ones if one is not None] for name, ones in told.items() if None not in ones}
    rows = [
        replace(row, verdict=Verdict.KNOWN, reason="; ".join(f"recorded as {one['id']}" for one in recorded[row.id]))
        if row.id in recorded
        else row
        for row in result.properties
    ]
    return replace(result, properties=rows)


def family_verdict(result: CampaignResult, policy: str, control: CampaignResult | None) -> tuple[Verdict, str]:
    """(verdict, reason) of a campaign, as ``verdict_of``."""
    return verdict_of(_outcome(result, policy, None if control is None else _caught(result, control, policy)))


def _outcome(result: CampaignResult, policy: str, control: Outcome | None) -> Outcome:
    programs = result.tally.coverage.programs
    return Outcome(
        policy,
        [(prop.id, prop.verdict, prop.tally.decisive_steps) for prop in result.properties],
        programs,
        min((bug.after for bug in result.found), default=None),
        interrupted(programs) if result.partial else None,
        control,
        result.profile.name,
    )


def _caught(result: CampaignResult, control: CampaignResult, policy: str) -> Outcome:
    caught = planted_bug(result, control)
    return replace(_outcome(control, policy, None), first_after=None if caught is None else caught.after)


def verdict_of(outcome: Outcome) -> tuple[Verdict, str]:
    """(verdict, reason). FAIL stays FAIL whatever else happened: its shrunk program is evidence by itself.

    A run that was interrupted never says PASS, and a run whose control was not caught is VACUOUS, but for KNOWN, which
    is as much evidence as FAIL.
    """
    control = outcome.control
    if outcome.worst is Verdict.FAIL:
        reason = _failed(outcome)
        return Verdict.FAIL, f"{reason}; {outcome.cut}" if outcome.cut else reason
    if outcome.cut:
        known = f"; {_known(outcome)}" if _ids(outcome, Verdict.KNOWN) else ""
        return Verdict.INCONCLUSIVE, outcome.cut + known
    if outcome.worst is Verdict.KNOWN:
        missed = control is not None and control.first_after is None
        return Verdict.KNOWN, _known(outcome) + ("; the planted bug was not caught" if missed else "")
    if control is not None and control.first_after is None:
        if control.cut:
            return Verdict.INCONCLUSIVE, f"{control.cut} of the control"
        return (
            Verdict.VACUOUS,
            f"the planted bug was not caught in {count(control.programs, 'program')}, so the run proves nothing"
            + _larger(outcome, "it"),
        )
    if outcome.worst is Verdict.PASS:
        return Verdict.PASS, f"{_passed(outcome)}; {_control_words(outcome)}"
    return outcome.worst, _doubtful(outcome)


def interrupted(programs: int) -> str:
    """Why not all was done."""
    return f"interrupted after {count(programs, 'program')}"


def _ids(outcome: Outcome, wanted: Verdict) -> list[str]:
    return [name for name, verdict, _ in outcome.properties if verdict is wanted]


def _of_all(outcome: Outcome, chosen: list[str]) -> str:
    return f"{len(chosen)} of {count(len(outcome.properties), 'property', 'properties')}"


def _failed(outcome: Outcome) -> str:
    failed = _ids(outcome, Verdict.FAIL)
    reason = f"{_of_all(outcome, failed)} {'fails' if len(failed) == 1 else 'fail'}: {', '.join(failed)}"
    if outcome.first_after is not None:
        reason += f"; the first was found after {count(outcome.first_after, 'program')}"
    return reason


def _known(outcome: Outcome) -> str:
    known = _ids(outcome, Verdict.KNOWN)
    told = f"{_of_all(outcome, known)} {'fails' if len(known) == 1 else 'fail'} as recorded: {', '.join(known)}"
    if ids := _ids(outcome, Verdict.VACUOUS):
        told += f"; without a decisive step: {', '.join(ids)}"
    return told


def _passed(outcome: Outcome) -> str:
    held = _ids(outcome, Verdict.PASS)
    decisive = sum(steps for _, _, steps in outcome.properties)
    others = [
        f"{len(ids)} {verdict.value}"
        for verdict in Verdict
        if verdict is not Verdict.PASS and (ids := _ids(outcome, verdict))
    ]
    exceptions = f" ({', '.join(others)})" if others else ""
    return (
        f"{count(len(held), 'property holds', 'properties hold')}{exceptions} over "
        f"{count(outcome.programs, 'program')}, {count(decisive, 'decisive step')}"
    )


def _control_words(outcome: Outcome) -> str:
    if outcome.control is not None and outcome.control.first_after is not None:
        return f"the planted bug was found after {count(outcome.control.first_after, 'program')}"
    if outcome.policy == PLANTED_POLICY:
        return "the planted bug was the target itself, and was not found"
    checked = any(name in _REFERENCES and verdict is Verdict.PASS for name, verdict, _ in outcome.properties)
    return "no planted bug was looked for" if checked else UNCHECKED


def _doubtful(outcome: Outcome) -> str:
    if ids := _ids(outcome, Verdict.INCONCLUSIVE):
        return f"{_of_all(outcome, ids)} could not be compared: {', '.join(ids)}"
    if ids := _ids(outcome, Verdict.VACUOUS):
        told, hint = ids, _larger(outcome, "it" if len(ids) == 1 else "them")
        if hint and len(ids) > NAMED:
            told = [*ids[:NAMED], f"{len(ids) - NAMED} more"]
        return f"{_of_all(outcome, ids)} met no decisive step on some configuration: {', '.join(told)}{hint}"
    return f"none of {count(len(outcome.properties), 'property', 'properties')} could judge this target"


def _larger(outcome: Outcome, what: str) -> str:
    """Which budget to ask for where this one is the likely reason."""
    return f"; smoke is too small for {what}: --profile quick" if outcome.profile == "smoke" else ""
