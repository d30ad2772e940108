"""The JSON Schema: takes every record there can be, and nothing else."""

import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from harness.findings import Verdict
from harness.reporting import load_schema, record_text
from harness.reporting.coverage import REACHED
from harness.tally import Coverage

Record = dict[str, Any]
VALIDATOR = jsonschema.Draft202012Validator(load_schema())


def test_it_is_a_schema_of_2020_12() -> None:
    assert load_schema()["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    jsonschema.Draft202012Validator.check_schema(load_schema())


def test_every_field_has_a_type_and_a_description() -> None:
    def fields(schema: Record, path: str) -> Iterator[tuple[str, Record]]:
        for name, part in schema.get("properties", {}).items():
            yield f"{path}/{name}", part
            yield from fields(part, f"{path}/{name}")
        for part in [*schema.get("anyOf", []), *schema.get("$defs", {}).values(), schema.get("items", {})]:
            yield from fields(part, f"{path}/*") if part else ()

    found = dict(fields(load_schema(), ""))
    assert len(found) > 60
    bare = [path for path, field in found.items() if "description" not in field]
    untyped = [p for p, field in found.items() if not {"type", "const", "enum", "anyOf", "$ref"} & set(field)]
    assert (bare, untyped) == ([], [])


def test_it_and_the_words_know_every_counter_and_every_verdict() -> None:
    properties = load_schema()["properties"]
    counters = [field.name for field in dataclasses.fields(Coverage)]
    assert list(properties["coverage"]["properties"]) == counters
    assert list(REACHED) == counters
    assert properties["properties"]["items"]["properties"]["verdict"]["enum"] == list(Verdict)


def test_it_takes_every_record_made_by_hand(each: Record) -> None:
    VALIDATOR.validate(each)


def test_it_takes_real_records(real_live: Record, real_offset: Record) -> None:
    VALIDATOR.validate(real_live)
    VALIDATOR.validate(real_offset)
    assert (real_live["verdict"], real_offset["verdict"]) == ("PASS", "FAIL")


def test_a_record_is_strict_json_and_comes_back_the_same(each: Record, real_live: Record) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    for record in (each, real_live):
        assert json.loads(record_text(record), parse_constant=refuse) == record
    with pytest.raises(ValueError, match="Out of range"):
        record_text({"worst": float("nan")})


def set_(*path: Any, to: Any) -> Callable[[Record], None]:
    def change(record: Record) -> None:
        at: Any = record
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = to

    return change


#: name -> (record, how it is spoilt)
SPOILT: dict[str, tuple[str, Callable[[Record], None]]] = {
    "another schema": ("pass", set_("schema", to="other")),
    "another version": ("pass", set_("schema_version", to=1)),
    "extra field": ("pass", set_("host", to="x")),
    "unknown verdict": ("pass", set_("verdict", to="OK")),
    "verdict of a property, not of a family": ("pass", set_("verdict", to="LIMITATION")),
    "KNOWN with a finding that is not": ("fail", set_("verdict", to="KNOWN")),
    "unknown verdict of a property": ("pass", set_("properties", 0, "verdict", to="pass")),
    "reason of two lines": ("pass", set_("verdict_reason", to="a\nb")),
    "no reason": ("pass", set_("verdict_reason", to="")),
    "profile as an object": ("pass", set_("profile", to={"name": "test"})),
    "budget without rules": ("pass", lambda record: record["budget"].pop("rules")),
    "budget without least": ("pass", lambda record: record["budget"].pop("least")),
    "budget without patience": ("pass", lambda record: record["budget"].pop("patience")),
    "budget without configurations": ("pass", lambda record: record["budget"].pop("configurations")),
    "budget with the old operations": ("pass", set_("budget", "operations", to=6)),
    "no program at least": ("pass", set_("budget", "least", to=0)),
    "negative patience": ("pass", set_("budget", "patience", to=-1)),
    "seed as text": ("pass", set_("seed", to="5")),
    "negative count": ("pass", set_("properties", 0, "steps", to=-1)),
    "half a program": ("pass", set_("programs", to=0.5)),
    "worst as other text": ("pass", set_("properties", 0, "worst", to="big")),
    "counter missing": ("pass", lambda record: record["coverage"].pop("trimmed")),
    "counter unknown": ("pass", set_("coverage", "other", to=1)),
    "property with another field": ("pass", set_("properties", 0, "host", to="x")),
    "no harness version": ("pass", lambda record: record["versions"].pop("kv-harness")),
    "version as number": ("pass", set_("versions", "mlx", to=0.32)),
    "configuration that does not say whether it was drawn": (
        "pass",
        lambda record: record["configurations"][0].pop("drawn"),
    ),
    "configuration without config": ("pass", lambda record: record["configurations"][0].pop("config")),
    "control caught is text": ("pass", set_("control", "caught", to="yes")),
    "control without seconds": ("pass", lambda record: record["control"].pop("seconds")),
    "finding without message": ("fail", lambda record: record["findings"][0].pop("message")),
    "finding with replay as list": ("fail", set_("findings", 0, "replay", to=[])),
    "finding with another owner": ("fail", set_("findings", 0, "program_json", "owners", to=["me"])),
    "interrupted PASS": ("pass", set_("partial", to=True)),
    "interrupted VACUOUS": ("vacuous", set_("partial", to=True)),
    "PASS with a missed control": ("control missed", set_("verdict", to="PASS")),
    "FAIL without a finding": ("fail", set_("findings", to=[])),
    "neither control nor reason": ("no control", set_("control_reason", to=None)),
    "control and a reason for none": ("pass", set_("control_reason", to="none")),
}


@pytest.mark.parametrize("name", SPOILT)
def test_it_refuses_a_spoilt_record(name: str, records: dict[str, Record]) -> None:
    origin, spoil = SPOILT[name]
    record = copy.deepcopy(records[origin])
    VALIDATOR.validate(record)
    spoil(record)
    assert not VALIDATOR.is_valid(record)


def test_it_refuses_a_record_that_lacks_any_field(records: dict[str, Record]) -> None:
    for field in records["pass"]:
        assert not VALIDATOR.is_valid({key: value for key, value in records["pass"].items() if key != field})
