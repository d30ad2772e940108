"""The JSON record of a family: everything that its report says, and all that it is made from."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from harness.judging import Property
from harness.recording import bare_trace
from harness.reporting.verdicts import PLANTED_POLICY, Known, family_verdict, planted_bug, with_known
from properties import ALL

if TYPE_CHECKING:  # at run time it would import Hypothesis, and a report is also written from a record alone
    from harness.campaign import CampaignResult, FoundBug, PropertyResult
    from harness.reporting.shards import Shard

SCHEMA = "kv-harness-family-report"
SCHEMA_VERSION = 2
READABLE = (1, SCHEMA_VERSION)
"""Of the first version every record is one of the second: it knew no KNOWN."""


def load_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a family record."""
    file = resources.files("harness.reporting").joinpath("schema", f"family-report-v{SCHEMA_VERSION}.json")
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema


def record_text(record: Mapping[str, Any]) -> str:
    """The record as strict JSON (RFC 8259) with a newline at its end. ValueError for NaN or infinity."""
    return json.dumps(record, allow_nan=False, indent=2) + "\n"


def family_record(
    result: CampaignResult,
    *,
    family: str,
    policy: str,
    path: str = "text",
    configurations: Sequence[Mapping[str, Any]],
    control: CampaignResult | None,
    device: str,
    versions: Mapping[str, str],
    command: str,
    replays: Mapping[str, str],
    kind: str = "reference",
    control_reason: str | None = None,
    limits: Sequence[str] = (),
    shard: Shard | None = None,
    properties: Iterable[Property] = ALL,
    known: Callable[[FoundBug], Known | None] = lambda _: None,
) -> dict[str, Any]:
    """The record of one campaign, valid under ``load_schema()``.

    ``path``: what the prompts held, ``text`` alone or ``images`` as well.  ``configurations``: ``{variant,
    storage, config, options}`` of every target that programs could be drawn for, and ``drawn`` where the
    configuration itself was (other keys are ignored).  ``control``: the same harness on the planted bug; without
    one ``control_reason`` says why.  ``replays``: property id -> command that replays its finding.  ``limits``:
    sentences on what this kind of target cannot show.  ``shard``: which part of the
    configurations was run.  ``properties``: where the sentences come from.  ``known``: what is recorded of a finding.

    ValueError: ``configurations`` lacks a target that was drawn, or names one twice (the record would then
    not say what ran), or a property is unknown.  TypeError: a configuration holds what JSON cannot.
    """
    result = with_known(result, known)
    verdict, reason = family_verdict(result, policy, control)
    control_cut = control is not None and control.partial and planted_bug(result, control) is None
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "family": family,
        "path": path,
        "target": f"{kind}:{family}" + ("" if path == "text" else f"+{path}"),
        "policy": policy,
        "profile": result.profile.name,
        "budget": {
            "programs": result.profile.programs,
            "rules": result.profile.operations,
            "least": result.profile.least,
            "of_a_kind": result.profile.of_a_kind,
            "patience": result.profile.patience,
            "far": result.profile.far,
            "configurations": result.profile.configurations,
            "remember": result.profile.remember,
        },
        "seed": result.seed,
        "verdict": verdict.value,
        "verdict_reason": reason,
        "partial": result.partial or control_cut,
        "versions": dict(versions),
        "device": device,
        "programs": result.tally.coverage.programs,
        "seconds": round(result.seconds, 3),
        "command": command,
        "configurations": _configurations(configurations, result.tally.targets),
        "properties": _properties(result.properties, {prop.id: prop.sentence for prop in properties}),
        "coverage": result.tally.coverage.to_json(),
        "control": None if control is None else _control(result, control, path),
        "control_reason": None if control is not None else control_reason or _no_control(result, policy),
        "findings": [_finding(bug, replays.get(bug.finding.property_id), known(bug)) for bug in result.found],
        "limits": list(limits),
        **({} if shard is None else {"shards": {"of": shard.of, "numbers": [shard.number]}}),
    }


def _configurations(given: Sequence[Mapping[str, Any]], drawn: Mapping[str, int]) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for one in given:
        name = f"{one['variant']}, {one['storage']}"
        if name in rows:
            raise ValueError(f"the configuration {name!r} is given twice")
        rows[name] = {key: plain(one[key]) for key in ("variant", "storage", "config", "options")}
        rows[name]["drawn"] = bool(one.get("drawn", False))
        rows[name]["programs"] = drawn.get(name, 0)
    if unknown := sorted(set(drawn) - set(rows)):
        raise ValueError(f"programs ran on {unknown[0]!r}, which is not among the configurations given")
    return list(rows.values())


def _properties(results: Sequence[PropertyResult], sentences: Mapping[str, str]) -> list[dict[str, Any]]:
    if unknown := [result.id for result in results if result.id not in sentences]:
        raise ValueError(f"there is no sentence for the property {unknown[0]!r}")
    return [
        {
            "id": result.id,
            "sentence": sentences[result.id],
            "verdict": result.verdict.value,
            "reason": result.reason,
            "examples": result.tally.examples,
            "steps": result.tally.steps,
            "decisive_steps": result.tally.decisive_steps,
            "worst": plain(result.tally.worst),
            **({"kinds": dict(sorted(result.tally.kinds.items()))} if result.tally.kinds else {}),
        }
        for result in results
    ]


def _no_control(result: CampaignResult, policy: str) -> str:
    if policy == PLANTED_POLICY:
        return f"the run itself is on the planted bug (the {PLANTED_POLICY} mask policy)"
    if result.partial:
        return "the run was interrupted before the control"
    return "no control was run"


def _control(result: CampaignResult, control: CampaignResult, path: str) -> dict[str, Any]:
    """What the control found. Where nothing counts as the planted bug: the first finding, to show why not."""
    caught = planted_bug(result, control)
    shown = caught or next(iter(control.found), None)
    return {
        "policy": PLANTED_POLICY if path == "text" else f"{PLANTED_POLICY}-behind-images",
        "property": None if shown is None else shown.finding.property_id,
        "caught": caught is not None,
        "verdict": control.verdict.value,
        "programs": control.tally.coverage.programs,
        "after_programs": None if shown is None else shown.after,
        "target": None if shown is None else shown.target.identity.full_name,
        "program": None if shown is None else str(shown.finding.program),
        "program_json": None if shown is None else shown.finding.program.to_json(),
        "message": None if shown is None else shown.finding.message,
        "operations": None if shown is None else len(shown.finding.program.operations),
        "reproducible": None if shown is None else shown.reproducible,
        "seconds": round(control.seconds, 3),
    }


def _finding(bug: FoundBug, replay: str | None, known: Known | None) -> dict[str, Any]:
    return {
        "property": bug.finding.property_id,
        "message": bug.finding.message,
        "target": bug.target.identity.full_name,
        "program": str(bug.finding.program),
        "program_json": bug.finding.program.to_json(),
        "operations": len(bug.finding.program.operations),
        "after_programs": bug.after,
        "reproducible": bug.reproducible,
        "replay": replay,
        "trace": bare_trace(bug.target, replace(bug.finding, reproducible=bug.reproducible)),
        **({} if known is None else {"known": dict(known)}),
    }


def plain(value: object) -> Any:
    """``value`` as what ``json.loads`` would give back. A number that JSON lacks becomes "nan", "inf" or
    "-inf"; TypeError for anything that is neither a number, a text, a list nor an object."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    raise TypeError(f"a report cannot hold a {type(value).__name__}")
