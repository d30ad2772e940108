"""The verdict of a family, and the one line that says why."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.findings import Verdict
from harness.reporting.text import count

if TYPE_CHECKING:  # at run time it would import Hypothesis, and a report is also written from a record alone
    from harness.campaign import CampaignResult, FoundBug

PLANTED_POLICY = "offset"
"""The mask policy of the control: the bug that every run must be able to find."""


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


def family_verdict(result: CampaignResult, policy: str, control: CampaignResult | None) -> tuple[Verdict, str]:
    """(verdict, reason). FAIL stays FAIL whatever else happened: its shrunk program is evidence by itself.

    A run that was interrupted never says PASS, and a run whose control was not caught is VACUOUS.
    """
    caught = planted_bug(result, control) if control is not None else None
    programs = result.tally.coverage.programs
    if result.verdict is Verdict.FAIL:
        reason = _failed(result)
        return Verdict.FAIL, f"{reason}; {_interrupted(programs)}" if result.partial else reason
    if result.partial:
        return Verdict.INCONCLUSIVE, _interrupted(programs)
    if control is not None and caught is None:
        tried = control.tally.coverage.programs
        if control.partial:
            return Verdict.INCONCLUSIVE, f"{_interrupted(tried)} of the control"
        return (
            Verdict.VACUOUS,
            f"the planted bug was not caught in {count(tried, 'program')}, so the run proves nothing",
        )
    if result.verdict is Verdict.PASS:
        return Verdict.PASS, f"{_passed(result)}; {_control_words(policy, caught)}"
    return result.verdict, _doubtful(result)


def _interrupted(programs: int) -> str:
    return f"interrupted after {count(programs, 'program')}"


def _ids(result: CampaignResult, verdict: Verdict) -> list[str]:
    return [prop.id for prop in result.properties if prop.verdict is verdict]


def _of_all(result: CampaignResult, chosen: list[str]) -> str:
    return f"{len(chosen)} of {count(len(result.properties), 'property', 'properties')}"


def _failed(result: CampaignResult) -> str:
    failed = _ids(result, Verdict.FAIL)
    reason = f"{_of_all(result, failed)} {'fails' if len(failed) == 1 else 'fail'}: {', '.join(failed)}"
    if result.found:
        first = min(result.found, key=lambda bug: bug.after)
        reason += f"; the first was found after {count(first.after, 'program')}"
    return reason


def _passed(result: CampaignResult) -> str:
    held = _ids(result, Verdict.PASS)
    decisive = sum(prop.tally.decisive_steps for prop in result.properties)
    others = [
        f"{len(ids)} {verdict.value}"
        for verdict in Verdict
        if verdict is not Verdict.PASS and (ids := _ids(result, verdict))
    ]
    exceptions = f" ({', '.join(others)})" if others else ""
    return (
        f"{count(len(held), 'property holds', 'properties hold')}{exceptions} over "
        f"{count(result.tally.coverage.programs, 'program')}, {count(decisive, 'decisive step')}"
    )


def _control_words(policy: str, caught: FoundBug | None) -> str:
    if caught is not None:
        return f"the planted bug was found after {count(caught.after, 'program')}"
    if policy == PLANTED_POLICY:
        return "the planted bug was the target itself, and was not found"
    return "no planted bug was looked for"


def _doubtful(result: CampaignResult) -> str:
    if ids := _ids(result, Verdict.INCONCLUSIVE):
        return f"{_of_all(result, ids)} could not be compared: {', '.join(ids)}"
    if ids := _ids(result, Verdict.VACUOUS):
        return f"{_of_all(result, ids)} met no decisive step on some configuration: {', '.join(ids)}"
    return f"none of {count(len(result.properties), 'property', 'properties')} could judge this target"
