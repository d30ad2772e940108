"""Findings that are recorded as bugs of a released engine: still bugs, but no news."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from harness.campaign import FoundBug
from harness.findings import NOT_AGAIN, Verdict
from harness.known_failures import Found, record_of
from harness.known_states import states_of
from harness.reporting.verdicts import PLANTED_POLICY, Known

LIBRARIES = {"mlx_lm": "mlx-lm", "mlx_vlm": "mlx-vlm"}
"""Kind of target -> the package that it judges, in this process; of another one the release is not known."""


def known_of(bug: FoundBug) -> Known | None:
    """What is recorded of a finding, of the release that is installed in this process; None where nothing is."""
    identity, finding = bug.target.identity, bug.finding
    library = LIBRARIES.get(identity.kind)
    if library is None or identity.policy == PLANTED_POLICY:  # whose bug is ours
        return None
    codes = tuple(type(operation).code for operation in finding.program.operations)
    named = getattr(bug.target, "caches", "")  # not of the variant's name, which of a checkpoint is that of its folder
    caches = tuple(named.split("@")) if named else ()
    if (version := installed(library)) is None:
        return None
    windows = [rule.window for rule in bug.target.rules if rule is not None and rule.window is not None]
    states = states_of(finding.program, min(windows, default=None))
    found = Found(library, version, identity.family, caches, finding.property_id, finding.message, codes, states)
    if (matching := record_of(found)) is None:
        return None
    failure, told = matching
    return {"id": failure.id, "title": failure.title, "upstream": failure.upstream, "matched": told}


def installed(library: str) -> str | None:
    """Which release of a package."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def unproved(record: dict[str, Any]) -> bool:
    """Does a record whose findings are all recorded also say that something was not shown: a property VACUOUS, or the
    planted bug missed? Its verdict, KNOWN, speaks of the findings."""
    missed = record["control"] is not None and not record["control"]["caught"]
    vacuous = any(each["verdict"] == Verdict.VACUOUS for each in record["properties"])
    return record["verdict"] == Verdict.KNOWN and (missed or vacuous)


def finding_text(found: dict[str, Any]) -> str:
    """A finding of a record, for a terminal."""
    known = found.get("known")
    told = f"      known     {known_line(known)}\n" if known else ""
    again = "" if found["reproducible"] else f"{NOT_AGAIN}\n"
    return (
        f"{'KNOWN' if known else 'FAIL'}  {found['property']}   {found['target']}\n      {found['message']}\n{told}"
        f"      program   {found['program']}\n{again}      replay    {found['replay']}"
    )


def known_line(known: Known) -> str:
    """What is recorded, and by what a finding matches it."""
    upstream = known["upstream"] or "no public report is known"
    return f"{known['id']}: {known['title']} ({upstream}); matched by {known['matched']}"
