"""A run in parts: which configurations a shard judges, and the record of the whole, made from those of the shards."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.findings import Verdict
from harness.reporting.verdicts import WORST, Outcome, interrupted, verdict_of
from harness.target import Capability
from properties import BY_ID

SHARDS = "shards"
"""The folder of their records, within that of reports; below it they lie where the record of the whole would."""
MOST = 1000
Record = Mapping[str, Any]
_SAME = ("schema_version", "target", "policy", "profile", "budget", "seed", "device", "versions")
"""What shards of one run have in common."""
_ANY = ("python", "platform", "pytest", "pytest-xdist", "tabulate")
"""Versions that may differ: they decide no result."""
_RANKS = ("FAIL", "INCONCLUSIVE", "KNOWN", "VACUOUS", "PASS")
_FOUND = ("FAIL", "KNOWN")
"""Verdicts of records with findings that must not be lost."""
_SEEN = frozenset({Capability.ATTENTION, Capability.POSITIONS})


class ShardError(ValueError):
    """No shard, or records that are not shards of one run; one line."""


@dataclass(frozen=True)
class Shard:
    """Part ``number`` (from 1) of ``of``."""

    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    @property
    def file_name(self) -> str:
        """Of its record, without a suffix."""
        return f"{self.number}-of-{self.of}"

    def of_these(self, count: int) -> range:
        """The numbers of the configurations, of so many, that it judges. Every one is in one shard: they are dealt out
        in turn, so that kinds of caches, which stand together, are spread over all."""
        return range(self.number - 1, count, self.of)


def shard_of(text: str) -> Shard:
    """``2/8``. ShardError."""
    found = re.fullmatch(r"([0-9]{1,4})/([0-9]{1,4})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= MOST:
        raise ShardError(f"must be I/N with 1 <= I <= N <= {MOST}, got {text!r:.40}")
    return Shard(int(found[1]), int(found[2]))


def whole_record(records: Sequence[Record]) -> dict[str, Any]:
    """The record of the run whose shards these are, in any order. Where some are missing it says so, and never PASS.

    ShardError: they are not of one run, or one is there twice.
    """
    for record in records:
        _check_numbers(record["shards"])
    records = sorted(records, key=lambda record: record["shards"]["numbers"])
    first, of = records[0], records[0]["shards"]["of"]
    for record in records[1:]:
        check_same(first, record)
    numbers = [number for record in records for number in record["shards"]["numbers"]]
    if len(set(numbers)) < len(numbers):
        raise ShardError("a shard is there twice")
    wanted = range(1, min(of, len(first["configurations"])) + 1)  # the others have nothing to judge
    missing = [number for number in wanted if number not in numbers]
    programs = sum(record["programs"] for record in records)
    partial = any(record["partial"] for record in records)
    cut = [interrupted(programs)] if partial else []
    cut += [f"shards missing: {', '.join(map(str, missing))} of {of}"] if missing else []
    coverage = {name: sum(record["coverage"][name] for record in records) for name in first["coverage"]}
    properties = zip(*(record["properties"] for record in records), strict=True)
    rows = [_property(each, coverage) for each in properties]
    findings = list(_findings(records))
    control = _control(records, findings)
    verdict, reason = verdict_of(
        Outcome(
            first["policy"],
            [(row["id"], Verdict(row["verdict"]), row["decisive_steps"]) for row in rows],
            programs,
            min((found["after_programs"] for found in findings), default=None),
            "; ".join(cut) or None,
            None if control is None else _outcome(control, first["policy"]),
            first["profile"],
        )
    )
    shard = f" --shard {first['shards']['numbers'][0]}/{of}"
    return {
        **first,
        "verdict": verdict.value,
        "verdict_reason": reason,
        "partial": bool(cut),
        "programs": programs,
        "seconds": round(sum(record["seconds"] for record in records), 3),
        "command": first["command"].removesuffix(shard),
        "configurations": [
            {**one, "programs": sum(record["configurations"][at]["programs"] for record in records)}
            for at, one in enumerate(first["configurations"])
        ],
        "properties": rows,
        "coverage": coverage,
        "control": control,
        "control_reason": None if control is not None else first["control_reason"],
        "findings": findings,
        "limits": list(dict.fromkeys(limit for record in records for limit in record["limits"])),
        "shards": {"of": of, "numbers": numbers},
    }


def check_same(first: Record, other: Record) -> None:
    """ShardError where these are not of one run."""
    for name in _SAME:
        mine, theirs = _told(first[name]), _told(other[name])
        for key in (key for key in (*mine, *theirs) if mine.get(key) != theirs.get(key)):
            told = f"{mine.get(key)!s:.80} and {theirs.get(key)!s:.80}"
            raise ShardError(f"of different {'versions' if name == 'versions' else 'runs'}: {key or name} {told}")
    if first["shards"]["of"] != other["shards"]["of"]:
        raise ShardError(f"of different divisions: into {first['shards']['of']} and into {other['shards']['of']}")
    if _named(first) != _named(other) or [row["id"] for row in first["properties"]] != [
        row["id"] for row in other["properties"]
    ]:
        raise ShardError("of different runs: their configurations or properties are not the same")


def _told(value: object) -> dict[str, Any]:
    """By its keys, so that an error names what differs; a value that has none is under the empty one."""
    return {key: one for key, one in value.items() if key not in _ANY} if isinstance(value, Mapping) else {"": value}


def _check_numbers(shards: Mapping[str, Any]) -> None:
    of, numbers = shards["of"], shards["numbers"]
    if type(of) is not int or not 1 <= of <= MOST or not numbers:
        raise ShardError(f"no shards: {numbers!r:.40} of {of!r:.40}")
    if any(type(number) is not int or not 1 <= number <= of for number in numbers):
        raise ShardError(f"no shards: {numbers!r:.40} of {of}")


def rank(record: Record) -> tuple[int, int, str]:
    """Lower is kept: worse, then of more programs. What the record found, which ``worse`` adds to, does not count."""
    told = {name: value for name, value in record.items() if name not in ("findings", "properties", "verdict_reason")}
    at = _RANKS.index(record["verdict"]) if record["verdict"] in _RANKS else len(_RANKS)  # of validations
    return at, -record.get("programs", 0), json.dumps(told, sort_keys=True)


def covers(record: Record, other: Record) -> bool:
    """Is ``other`` of the same run, of no shard beside those of ``record``, and without a finding to lose?"""
    if other["verdict"] in _FOUND or not _one_run(record, other):
        return False
    return set(other["shards"]["numbers"]) <= set(record["shards"]["numbers"])


def worse(one: Record, other: Record) -> dict[str, Any]:
    """Of two records of one place the one to keep: what has all shards of the other one, else the worse one. Of two
    that FAIL (or KNOWN) it also has what the other one found: the same in whatever order, and however often."""
    if covers(one, other) != covers(other, one):
        return dict(one if covers(one, other) else other)
    kept, left = sorted((one, other), key=lambda each: (*rank(each), json.dumps(each, sort_keys=True)))
    if kept["verdict"] not in _FOUND or left["verdict"] not in _FOUND or "budget" not in kept:  # a validation
        return dict(kept)
    known = {_bug(finding) for finding in kept["findings"]} if _one_run(kept, left) else set()
    more = [each for each in left["findings"] if each not in kept["findings"] and _bug(each) not in known]
    if not more:
        return dict(kept)
    findings = sorted([*kept["findings"], *more], key=lambda each: (each["after_programs"], json.dumps(each)))
    of = {row["id"]: [each for each in findings if each["property"] == row["id"]] for row in kept["properties"]}
    rows = [_with_findings(row, of[row["id"]]) for row in kept["properties"]]
    made = {**kept, "findings": findings, "properties": rows}
    return {**made, "verdict_reason": kept["verdict_reason"].replace(_reason(kept), _reason(made))}


def _bug(finding: Record) -> tuple[str, str | None]:
    """What tells findings apart: the property, and the record that it matches. What is recorded hides no other."""
    return finding["property"], finding.get("known", {}).get("id")


def _with_findings(row: Record, found: Sequence[Record]) -> Record:
    """KNOWN only if all of them are recorded."""
    if not found:
        return row
    recorded = [_bug(each)[1] for each in found]
    if None in recorded:
        return {**row, "verdict": "FAIL", "reason": None}
    told = "; ".join(f"recorded as {name}" for name in dict.fromkeys(recorded))
    return {**row, "verdict": "KNOWN", "reason": told}


def _reason(record: Record) -> str:
    """Of its verdict, without what was cut."""
    rows = [(row["id"], Verdict(row["verdict"]), row["decisive_steps"]) for row in record["properties"]]
    first = min(found["after_programs"] for found in record["findings"])
    return verdict_of(Outcome(record["policy"], rows, record["programs"], first))[1]


def _one_run(one: Record, other: Record) -> bool:
    try:
        check_same(one, other)
    except (ShardError, KeyError):
        return False
    return True


def _named(record: Record) -> list[Any]:
    return [{**one, "programs": None} for one in record["configurations"]]


def _property(rows: Sequence[Record], coverage: Mapping[str, int]) -> dict[str, Any]:
    """A property over all shards: its worst verdict, as a run of the whole would say it."""
    met = {Verdict(row["verdict"]) for row in rows}
    verdict = next((worst for worst in WORST if worst in met), Verdict.NOT_APPLICABLE)
    reasons = list(dict.fromkeys(row["reason"] for row in rows if row["verdict"] == verdict.value and row["reason"]))
    if verdict is Verdict.PASS and (blind := coverage["blind_forwards"]) and BY_ID[rows[0]["id"]].needs & _SEEN:
        verdict = Verdict.INCONCLUSIVE  # what one shard could not see may be what another relies on
        reasons = [f"{blind} of {coverage['forwards']} forwards hid attention or position calls"]
    kinds: Counter[str] = sum((Counter(row.get("kinds", {})) for row in rows), Counter())
    worst = [row["worst"] for row in rows if row["worst"] is not None]
    return {
        **rows[0],
        "verdict": verdict.value,
        "reason": "; ".join(reasons) or None,
        **{name: sum(row[name] for row in rows) for name in ("examples", "steps", "decisive_steps")},
        "worst": max(worst, key=_size) if worst else None,
        **({"kinds": dict(sorted(kinds.items()))} if kinds else {}),
    }


def _size(worst: float | str) -> float:
    number = float(worst)
    return float("inf") if number != number else number


def _findings(records: Sequence[Record]) -> Iterator[Record]:
    """Of every property, and of every record that its findings match, the shortest, in the order in which they were
    found; the first shard's of equal ones."""
    found = [finding for record in records for finding in record["findings"]]
    for bug in dict.fromkeys(_bug(each) for each in sorted(found, key=lambda each: each["after_programs"])):
        yield min((each for each in found if _bug(each) == bug), key=lambda each: each["operations"])


def _control(records: Sequence[Record], findings: Sequence[Record]) -> dict[str, Any] | None:
    """That of the first shard that caught the planted bug, else of the first: every shard looks for it on all
    configurations. What the run itself breaks in any shard is not the planted bug."""
    controls = [record["control"] for record in records if record["control"] is not None]
    if not controls:
        return None
    shown = next((control for control in controls if control["caught"]), controls[0])
    broken = {finding["property"] for finding in findings}
    return {**shown, "caught": shown["caught"] and shown["property"] not in broken}


def _outcome(control: Record, policy: str) -> Outcome:
    return Outcome(policy, (), control["programs"], control["after_programs"] if control["caught"] else None)
