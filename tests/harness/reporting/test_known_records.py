"""KNOWN in what is made of records: shards, the record that is kept of two, history, pages."""

from __future__ import annotations

import itertools
from typing import Any

import jsonschema
import pytest

from harness.known import unproved
from harness.reporting import family_markdown, html_page, load_schema
from harness.reporting.grids import over_time
from harness.reporting.history import BAD, checked, entry, properties_over_time
from harness.reporting.issue import issue_markdown
from harness.reporting.shards import Shard, whole_record, worse

Record = dict[str, Any]
VALIDATOR = jsonschema.Draft202012Validator(load_schema())
MASK = "mask_key_axis_equals_live_keys"
RECORDED = {"id": "some_bug", "title": "too wide", "upstream": "https://example.org/1", "matched": "property"}


def shards(make: Record, *is_known: bool) -> list[Record]:
    """One for each, with a finding of one property, recorded or not."""
    return [
        make["record"](
            make["campaign"](found=(make["bug"](),), coverage={"blind_forwards": 0}),
            shard=Shard(number, len(is_known)),
            known=lambda _, told=RECORDED if recorded else None: told,
        )
        for number, recorded in enumerate(is_known, 1)
    ]


@pytest.mark.parametrize(
    ("is_known", "verdict", "findings"),
    [((True, True), "KNOWN", 1), ((True, False), "FAIL", 2), ((False, True), "FAIL", 2), ((False, False), "FAIL", 1)],
    ids=["both", "the first", "the second", "none"],
)
def test_the_whole_is_known_only_if_every_shard_is(
    is_known: tuple[bool, bool], verdict: str, findings: int, make: Record
) -> None:
    for order in itertools.permutations(shards(make, *is_known)):
        whole = whole_record(order)
        VALIDATOR.validate(whole)
        (row,) = (row for row in whole["properties"] if row["id"] == MASK)
        assert (whole["verdict"], row["verdict"], len(whole["findings"])) == (verdict, verdict, findings)


@pytest.mark.parametrize("is_known", [(True, False), (True, True)], ids=["one", "both"])
def test_of_two_records_of_a_place_none_loses_what_is_not_known(is_known: tuple[bool, bool], make: Record) -> None:
    one, other = shards(make, *is_known)
    other["shards"]["numbers"] = one["shards"]["numbers"]
    kept = worse(one, other)
    assert kept == worse(other, one) == worse(kept, one) == worse(kept, other)
    VALIDATOR.validate(kept)
    assert kept["verdict"] == ("KNOWN" if all(is_known) else "FAIL")
    assert any("known" not in found for found in kept["findings"]) != all(is_known)


def test_it_is_shown_where_verdicts_are(records: dict[str, Record]) -> None:
    record = records["known and limited"]
    assert record["verdict"] == "KNOWN" and "KNOWN" in BAD
    line = checked(entry(record, "2026-01-02T00:00:00+00:00"))
    assert line["broken"] == [MASK] and line["verdicts"][MASK] == "KNOWN"
    assert f"| {record['target']} | {MASK} | K" in " ".join(properties_over_time([line]).split())
    assert "FAIL or KNOWN" in (over_time(record["target"], [line]) or "")
    assert issue_markdown([record]) == ""  # no news
    assert "known     some_bug: masks | too wide\n" in issue_markdown([{**record, "verdict": "FAIL"}])
    text = family_markdown(record)
    assert "Known: some_bug: masks \\| too wide (no public report is known); matched by property" in text
    assert '<p class="verdict KNOWN">' in html_page(text)


def test_a_record_of_the_first_version_is_still_read(records: dict[str, Record]) -> None:
    assert family_markdown(records["pass"] | {"schema_version": 1}) == family_markdown(records["pass"])


@pytest.mark.parametrize("what", ["nothing", "vacuous", "missed"])
def test_what_was_not_shown_behind_a_known_finding_is_not_passed_over(what: str, make: Record) -> None:
    """Its verdict speaks of the finding; a strict run asks for the rest as well."""
    (record,) = shards(make, True)
    record["control"] = record["control"] or {"caught": True}
    record["properties"] = [row for row in record["properties"] if row["verdict"] != "VACUOUS"]
    if what == "vacuous":
        record["properties"].append({"id": "x", "verdict": "VACUOUS"})
    record["control"]["caught"] = what != "missed"
    assert record["verdict"] == "KNOWN" and unproved(record) is (what != "nothing")
