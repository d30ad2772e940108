"""The report of one checkpoint: Markdown, from the record of ``harness.validation`` and nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

from harness.reporting.reproduction import reproduction
from harness.reporting.text import block, count, escape, table

SCHEMA = "kv-harness-checkpoint-report"
SCHEMA_VERSION = 1
Record = Mapping[str, Any]
MASKS = "The first wrong mask of every side"
"""The heading below which a page has the pictures of them."""
_REFERENCE = "the reference engine of this harness, with the checkpoint's weights"
"""What older records, which name no engine, were made with."""


def load_checkpoint_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a checkpoint's record."""
    file = resources.files("harness.reporting").joinpath("schema", f"checkpoint-report-v{SCHEMA_VERSION}.json")
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return schema


def checkpoint_markdown(record: Record) -> str:
    """The whole report. ValueError for a record of another schema or version."""
    name, version = record.get("schema"), record.get("schema_version")
    if (name, version) != (SCHEMA, SCHEMA_VERSION):
        raise ValueError(f"not a {SCHEMA} of version {SCHEMA_VERSION}: {name!r:.60}, version {version!r:.20}")
    sections = (
        f"# Checkpoint report: {escape(record['checkpoint']['name'])}",
        f"**{escape(record['verdict'])}**: {escape(record['verdict_reason'])}",
        *(("## What to ask for instead", escape(record["instead"])) if "instead" in record else ()),
        "## What was checked against what",
        _what(record),
        table(
            ("chunk", "tokens", "offset", "live_len", "mask by offset", "keys", "decisive"),
            [
                (
                    chunk["number"],
                    chunk["tokens"],
                    chunk["offset"],
                    chunk["live_len"],
                    chunk["offset"] + chunk["tokens"],
                    chunk["live_len"] + chunk["tokens"],
                    "yes" if chunk["decisive"] else "no",
                )
                for chunk in record["plan"]["chunks"]
            ],
            right={0, 1, 2, 3, 4, 5},
        ),
        "\n".join(
            f"- {escape(one['name'])}: {escape(one['phrase'])}: {escape(one['program_text'])}"
            for one in record["plan"]["programs"]
        )
        or "No program was run.",
        "## Acceptance",
        table(
            ("criterion", "result", "evidence", "decisive steps"),
            [
                (row["criterion"], row["result"], row["evidence"], f"{row['decisive_steps']:,}")
                for row in record["acceptance"]
            ],
            right={3},
        ),
        "Decisive: a step that could tell a right target from a wrong one.",
        *_sides(record),
        *_masks(record),
        "## What this run could not show",
        "\n".join(f"- {escape(limit)}" for limit in record["limits"]),
        "## Findings",
        *_findings(record),
        "## The same run again",
        block(record["command"]),
    )
    return "\n\n".join(sections) + "\n"


def _what(record: Record) -> str:
    checkpoint, plan, first = record["checkpoint"], record["plan"], record["plan"]["first_decisive"]
    rows = [
        ("checkpoint", checkpoint["name"]),
        ("family", checkpoint["family"]),
        ("variant", checkpoint["variant"]),
        ("fingerprint", f"sha256:{checkpoint['fingerprint']}"),
        ("weights", f"{checkpoint['bytes']:,} bytes, {checkpoint['parameters']:,} parameters"),
        ("quantisation", checkpoint["quantisation"] or "none"),
        ("computed in", record["dtype"]),
        *_engines(record),
        *((f"mask policy {side}", policy) for side, policy in record["sides"].items()),
        ("device", record["device"]),
        *record["versions"].items(),
        ("seed", record["seed"]),
        ("P, --max-kv-size", plan["max_kv_size"]),
        ("C, --prefill-chunk-size", plan["prefill_chunk_size"]),
        ("N, --tokens", plan["tokens"]),
        ("K, --decode", plan["decode"]),
        ("trims of the bounded program", plan["trims"]),
        ("first decisive chunk", f"{'none' if first is None else first['number']} of {len(plan['chunks'])}"),
        ("estimated memory", f"{record['memory_estimate']:,} bytes" if plan["programs"] else "nothing was loaded"),
        ("written", f"{record['written']['at']}, after {record['written']['seconds']:,} s"),
    ]
    return table(("what", "against what"), rows)


def _engines(record: Record) -> Iterator[tuple[str, str]]:
    """What ran it; of two engines, which of them ran which sides, and what is not the same of the other."""
    judged = record["engine"]["phrase"] if "engine" in record else _REFERENCE
    if (other := record.get("before_engine")) is None:
        yield "engine", judged
        return
    yield from (("engine after", judged), ("engine before", other["phrase"]), ("before computed in", other["dtype"]))
    if other["device"] != record["device"]:
        yield "device before", other["device"]


def _sides(record: Record) -> Iterator[str]:
    """What the masks of the sides that are not judged did."""
    rows = [
        (
            crash["side"],
            crash["program"],
            crash["operation"],
            f"({', '.join(map(str, crash['mask_shape']))})",
            f"({', '.join(map(str, crash['score_shape']))})",
            crash["error"] or "nothing was raised",
        )
        for crash in record["crashes"]
    ]
    if rows:
        yield "## Masks that do not fit their keys"
        yield table(("side", "program", "operation", "mask", "scores", "raised"), rows)


def _masks(record: Record) -> Iterator[str]:
    """Older records have none."""
    if not (masks := record.get("masks")):
        return
    yield f"## {MASKS}"
    yield "\n".join(f"- {escape(mask_phrase(each))}" for each in masks)


def mask_phrase(mask: Mapping[str, Any]) -> str:
    """Which mask of a record's ``masks`` this is, and how wrong it is."""
    where, cells = f"{mask['side']}, program {mask['program']}, {mask['operation']}", mask["cells"]
    if mask["layer"] is None:
        return f"{where}: it does not fit, which was raised before attention was given it, so that there is no picture"
    told = f"{where}, layer {mask['layer']}: mask ({', '.join(map(str, mask['mask_shape'] or ()))})"
    if cells is None:
        return f"{told}; the engine does not tell what it shows, so that there is no picture"
    wrong = f"{count(cells['wrong'], 'entry', 'entries')} wrong, {cells['beyond']:,} beyond the keys"
    return f"{told} over {count(cells['keys'], 'key')}, {wrong}"


def _findings(record: Record) -> Iterator[str]:
    if not record["findings"]:
        yield "None."
    for number, found in enumerate(record["findings"], 1):
        yield f"### {number}. {escape(found['property'])}, program {escape(found['program'])}"
        yield block(
            f"FAIL  {found['property']}   {found['target']}\n      {found['message']}\n"
            f"      program   {found['program_text']}\n      replay    {found['replay']}{_origin(found)}"
        )
        if told := reproduction(found):
            yield told


def _origin(found: Mapping[str, Any]) -> str:
    """What a shrunk program came from."""
    if (original := found.get("original")) is None:
        return ""
    return (
        f"\n      shrunk from\n        program   {original['program_text']}\n        message   {original['message']}"
        f"\n        replay    {original['replay']}"
    )
