"""The report that people read, made from the record and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.findings import Finding, Verdict, Violation
from harness.operations import Program
from harness.reporting import coverage
from harness.reporting.record import READABLE, SCHEMA
from harness.reporting.reproduction import reproduction
from harness.reporting.text import block, count, escape, number, table
from harness.reporting.verdicts import PLANTED_POLICY
from harness.words import in_words

Record = Mapping[str, Any]


def family_markdown(record: Record) -> str:
    """The whole report of one family. ValueError for a record of another schema or version."""
    name, version = record.get("schema"), record.get("schema_version")
    if name != SCHEMA or version not in READABLE:
        versions = " or ".join(map(str, READABLE))
        raise ValueError(f"not a {SCHEMA} of version {versions}: {name!r:.60}, version {version!r:.20}")
    sections = (
        f"# KV cache and mask report: {escape(record['target'])}",
        f"**{escape(record['verdict'])}**: {escape(record['verdict_reason'])}",
        "## What was checked",
        _what(record),
        *_configurations(record["configurations"]),
        "## Properties",
        *_properties(record["properties"]),
        "## Coverage",
        table(("what was reached", "count"), coverage.rows(record["coverage"], record["path"]), right={1}),
        "## Control: the planted bug",
        *_control(record),
        "## Findings",
        *_findings(record["findings"]),
        "## What this run could not show",
        "\n".join(f"- {escape(limit)}" for limit in what_it_could_not_show(record)),
        "## The same run again",
        block(record["command"]),
    )
    return "\n\n".join(sections) + "\n"


def summary_table(records: Sequence[Record]) -> str:
    """One row per record, in the order given. A run on another path than text or another mask policy than live says so
    by its name."""
    return table(
        ("family", "verdict", "programs", "decisive steps", "control caught after"),
        [
            (
                record["family"]
                + ("" if record["path"] == "text" else f"+{record['path']}")
                + ("" if record["policy"] == "live" else f" ({record['policy']} mask)"),
                record["verdict"],
                f"{record['programs']:,}",
                f"{sum(prop['decisive_steps'] for prop in record['properties']):,}",
                _control_in_short(record["control"]),
            )
            for record in records
        ],
        right={2, 3},
    )


def what_it_could_not_show(record: Record) -> list[str]:
    """Sentences, most important first; never empty, for a run is always on some device."""
    return list(_limits(record))


def _length(record: Record) -> str:
    """How long the programs were."""
    return f"{record['coverage']['operations'] / max(record['programs'], 1):.1f} operations"


def _what(record: Record) -> str:
    budget, configurations = record["budget"], record["configurations"]
    run, drawn = (sum(bool(one[key]) for one in configurations) for key in ("programs", "drawn"))
    share = f"{count(budget['programs'], 'program')} over the configurations, at least {budget['least']} on each"
    rows = [
        ("target", record["target"]),
        ("path", record["path"]),
        ("mask policy", record["policy"]),
        ("configurations", f"{run:,} of {len(configurations):,} run; {drawn:,} drawn by the seed"),
        *([("shards", _shards(record["shards"]))] if "shards" in record else []),
        ("device", record["device"]),
        *((name, version) for name, version in record["versions"].items()),
        ("profile", f"{record['profile']} ({share})"),
        ("seed", record["seed"]),
        ("programs", f"{record['programs']:,}, of {_length(record)} on average"),
        ("seconds", f"{record['seconds']:,}"),
    ]
    return table(("what", "against what"), rows)


def _shards(shards: Record) -> str:
    """Which parts of the run are in the report."""
    return f"{', '.join(map(str, shards['numbers']))} of {shards['of']}"


def _configurations(configurations: Sequence[Record]) -> Iterator[str]:
    rows = [
        (
            one["variant"],
            one["storage"],
            ", ".join(f"{key}={value}" for key, value in one["options"].items()) or "-",
            f"{one['programs']:,}",
        )
        for one in configurations
    ]
    yield table(("configuration", "cache", "options", "programs"), rows, right={3})
    if told := [one for one in configurations if one["drawn"]]:
        simplest = configurations[0]
        yield f"Drawn by the seed; what differs from {escape(simplest['variant'])}:"
        yield "\n".join(
            f"- {escape(one['variant'])}: {escape(in_words(one['config'], simplest['config']) or 'only the options')}"
            for one in told
        )


def _properties(properties: Sequence[Record]) -> Iterator[str]:
    rows = [
        (
            prop["id"],
            prop["verdict"],
            f"{prop['examples']:,}",
            f"{prop['steps']:,}",
            f"{prop['decisive_steps']:,}",
            number(prop["worst"]),
        )
        for prop in properties
    ]
    yield table(("property", "verdict", "examples", "steps", "decisive", "worst"), rows, right={2, 3, 4, 5})
    lines = []
    for prop in properties:
        because = f" {prop['verdict']}: {prop['reason']}." if prop["reason"] else ""
        if kinds := prop.get("kinds"):
            because += f" Decisive: {', '.join(f'{count:,} {words}' for words, count in kinds.items())}."
        lines.append(f"- {escape(prop['id'])}: {escape(prop['sentence'] + because)}")
    if lines:
        yield "\n".join(lines)
    yield (
        "examples: programs in which the property looked at something; decisive: steps that could tell a "
        "right target from a wrong one; worst: the largest difference met. After a finding the counts "
        "include the programs that were run to shrink it."
    )


def _failure(finding: Record, replay: str | None) -> str:
    """The standard form, from the one place that knows it."""
    message = " ".join(finding["message"].split())
    program = Program.from_json(finding["program_json"])
    found = Finding(finding["property"], finding["target"], Violation(None, message), program)
    return block(found.text(replay, known="known" in finding))


def _control(record: Record) -> Iterator[str]:
    control = record["control"]
    if control is None:
        yield f"None: {escape(record['control_reason'])}."
        return
    intro = f"In the same run the same harness was given the {escape(control['policy'])} mask policy"
    spent = f"{count(control['programs'], 'program')}, {control['seconds']:,} s in all"
    if control["caught"]:
        yield (
            f"{intro}. It found the bug after {count(control['after_programs'], 'program')} and shrunk it to "
            f"{count(control['operations'], 'operation')} ({spent}):"
        )
    elif control["property"] is None:
        yield f"{intro} and found nothing ({spent}). A harness that misses a planted bug proves nothing."
        return
    elif not control["reproducible"]:
        yield f"{intro}. What it found did not come back in a fresh session, so it does not count ({spent}):"
    else:
        yield f"{intro}. What it found the run itself breaks as well, so it does not count ({spent}):"
    yield _failure(control, None)


def _control_in_short(control: Record | None) -> str:
    if control is None:
        return "no control"
    return count(control["after_programs"], "program") if control["caught"] else "not caught"


def _findings(findings: Sequence[Record]) -> Iterator[str]:
    if not findings:
        yield "None."
    for position, finding in enumerate(findings, 1):
        yield (
            f"### {position}. {escape(finding['property'])}\n\n"
            f"Found after {count(finding['after_programs'], 'program')}, "
            f"shrunk to {count(finding['operations'], 'operation')}."
            + ("" if finding["reproducible"] else " It did not come back in a fresh session.")
        )
        if known := finding.get("known"):
            yield f"Known: {known_words(known)}."
        yield _failure(finding, finding["replay"])
        if told := reproduction(finding):
            yield told


def known_words(known: Mapping[str, str]) -> str:
    """The record that a finding matches, as Markdown."""
    upstream = escape(known["upstream"] or "no public report is known")
    return f"{escape(known['id'])}: {escape(known['title'])} ({upstream}); matched by {escape(known['matched'])}"


def _limits(record: Record) -> Iterator[str]:
    if record["partial"]:
        yield f"The run is not complete: {record['verdict_reason']}."
    for prop in record["properties"]:
        if prop["verdict"] == Verdict.KNOWN:
            yield (
                f"{prop['id']} is {prop['verdict']}: {prop['reason']}. The search for it ended there: another bug that "
                "breaks the same property may lie behind the recorded one."
            )
        elif prop["verdict"] not in (Verdict.PASS, Verdict.FAIL):
            yield f"{prop['id']} is {prop['verdict']}: {prop['reason'] or 'no reason was given'}."
    control = record["control"]
    if control is None and record["policy"] != PLANTED_POLICY:
        yield f"Nothing shows that the harness would have found a bug here: {record['control_reason']}."
    if control is not None and not control["caught"]:
        yield "The planted bug was not caught, so that nothing was found does not mean that nothing is there."
    yield from coverage.gaps(record["coverage"], record["path"])
    missed = [one for one in record["configurations"] if not one["programs"]]
    if missed:
        names = ", ".join(f"{one['variant']} with {one['storage']}" for one in missed)
        yield f"No program was drawn for {count(len(missed), 'configuration')}: {names}."
    for finding in record["findings"]:
        if not finding["reproducible"]:
            yield f"What makes {finding['property']} fail is open: it did not come back in a fresh session."
    if not any(prop["id"].startswith("outputs_equal_") for prop in record["properties"]):
        yield (
            "No logits were compared with an independent computation: masks, positions, lengths and cached rows were "
            "judged, not what the layers make of them."
        )
    yield from record["limits"]
    if record["target"].startswith("reference:"):
        yield "No checkpoint was loaded: the models are tiny and their float32 weights are random."
    yield f"Everything was measured on one device ({record['device']}); others round differently."
    yield (
        f"It speaks of the {count(record['programs'], 'program')} drawn, of {_length(record)} "
        f"on average; it is no proof for all others."
    )
