"""The verdict of a family, and the one line that says why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from harness.findings import Verdict
from harness.reporting.text import count

if TYPE_CHECKING:  # at run time it would import Hypothesis, and a report is also written from a record alone
    from harness.campaign import CampaignResult, FoundBug

PLANTED_POLICY = "offset"
"""The mask policy of the control: the bug that every run must be able to find."""
UNCHECKED = "no planted bug was looked for, and what the logits must be, nothing but the target says"
"""Of a PASS that neither a control nor a reference stands behind."""
_REFERENCES = ("outputs_equal_the_witness", "outputs_equal_the_cache_free_forward")
WORST = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.VACUOUS, Verdict.PASS)


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
    caught), and None where there was none.
    """

    policy: str
    properties: Sequence[tuple[str, Verdict, int]]
    programs: int
    first_after: int | None = None
    cut: str | None = None
    control: Outcome | None = None

    @property
    def worst(self) -> Verdict:
        """Of its properties."""
        met = {verdict for _, verdict, _ in self.properties}
        return next((verdict for verdict in WORST if verdict in met), Verdict.VACUOUS)


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
    )


def _caught(result: CampaignResult, control: CampaignResult, policy: str) -> Outcome:
    caught = planted_bug(result, control)
    return replace(_outcome(control, policy, None), first_after=None if caught is None else caught.after)


def verdict_of(outcome: Outcome) -> tuple[Verdict, str]:
    """(verdict, reason). FAIL stays FAIL whatever else happened: its shrunk program is evidence by itself.

    A run that was interrupted never says PASS, and a run whose control was not caught is VACUOUS.
    """
    control = outcome.control
    if outcome.worst is Verdict.FAIL:
        reason = _failed(outcome)
        return Verdict.FAIL, f"{reason}; {outcome.cut}" if outcome.cut else reason
    if outcome.cut:
        return Verdict.INCONCLUSIVE, outcome.cut
    if control is not None and control.first_after is None:
        if control.cut:
            return Verdict.INCONCLUSIVE, f"{control.cut} of the control"
        return (
            Verdict.VACUOUS,
            f"the planted bug was not caught in {count(control.programs, 'program')}, so the run proves nothing",
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
        return f"{_of_all(outcome, ids)} met no decisive step on some configuration: {', '.join(ids)}"
    return f"none of {count(len(outcome.properties), 'property', 'properties')} could judge this target"
