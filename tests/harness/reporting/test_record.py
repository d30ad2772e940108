"""The record says what the campaign measured, and no verdict that it did not earn."""

import copy
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from harness.findings import Verdict
from harness.profiles import PROFILES
from harness.reporting.record import plain
from harness.targets.reference import targets
from properties import ALL

Record = dict[str, Any]
DECISIVE = sum(1000 + number for number in range(len(ALL)))
BUT_ONE = DECISIVE - 1000
MASK = ALL[0].id
MISSED = "the planted bug was not caught in 1,234 programs, so the run proves nothing"
CAUGHT = "the planted bug was found after 3 programs"
FIRST = "the first was found after 3 programs"

#: record -> (verdict, partial, reason)
VERDICTS = {
    "pass": (
        "PASS",
        False,
        f"{len(ALL)} properties hold over 1,234 programs, {DECISIVE:,} decisive steps; {CAUGHT}",
    ),
    "fail": ("FAIL", False, f"1 of {len(ALL)} properties fails: positions_are_absolute; {FIRST}"),
    "fail, partial": (
        "FAIL",
        True,
        f"1 of {len(ALL)} properties fails: {MASK}; {FIRST}; interrupted after 1,234 programs",
    ),
    "offset": ("FAIL", False, f"2 of {len(ALL)} properties fail: {MASK}, every_operation_completes; {FIRST}"),
    "partial": ("INCONCLUSIVE", True, "interrupted after 1,234 programs"),
    "partial control": ("INCONCLUSIVE", True, "interrupted after 1,234 programs of the control"),
    "no control": (
        "PASS",
        False,
        f"{len(ALL)} properties hold over 1,234 programs, {DECISIVE:,} decisive steps; no planted bug was looked for",
    ),
    "control missed": ("VACUOUS", False, MISSED),
    "control flaky": ("VACUOUS", False, MISSED),
    "vacuous": ("VACUOUS", False, f"1 of {len(ALL)} properties met no decisive step on some configuration: {MASK}"),
    "not applicable": (
        "PASS",
        False,
        f"{len(ALL) - 1} properties hold (1 NOT APPLICABLE) over 1,234 programs, {BUT_ONE:,} decisive steps; {CAUGHT}",
    ),
    "nothing applicable": ("VACUOUS", False, f"none of {len(ALL)} properties could judge this target"),
    "inconclusive": ("INCONCLUSIVE", False, f"1 of {len(ALL)} properties could not be compared: {MASK}"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_verdict_and_reason(name: str, records: dict[str, Record]) -> None:
    record = records[name]
    assert (record["verdict"], record["partial"], record["verdict_reason"]) == VERDICTS[name]


def test_a_smoke_run_that_proves_nothing_says_what_would(make: Record) -> None:
    """In few words: what was too small is the budget, and not each of the properties."""
    vacuous = [dict.fromkeys((prop.id for prop in ALL[:number]), Verdict.VACUOUS) for number in (1, 5, 0)]
    few, many, missed = map(make["campaign"], vacuous)
    for result in (few, many, missed):
        result.profile = PROFILES["smoke"]
    caught = make["campaign"](found=(make["bug"]("chunks_equal_one_shot"),))
    records = [make["record"](few, caught), make["record"](many, caught), make["record"](missed, make["campaign"]())]
    of, three = f"of {len(ALL)} properties met no decisive step on some configuration", [prop.id for prop in ALL[:3]]
    assert [record["verdict_reason"] for record in records] == [
        f"1 {of}: {MASK}; smoke is too small for it: --profile quick",
        f"5 {of}: {', '.join(three)}, 2 more; smoke is too small for them: --profile quick",
        f"{MISSED}; smoke is too small for it: --profile quick",
    ]


def test_fail_stays_fail_whatever_the_control_says(make: Record) -> None:
    failing = make["campaign"](found=(make["bug"](),))
    for control in (None, make["campaign"](), make["campaign"](partial=True)):
        assert make["record"](failing, control)["verdict"] == "FAIL"


def test_the_reason_of_a_fail_tells_the_earliest_finding(make: Record) -> None:
    found = (make["bug"](after=41), make["bug"]("positions_are_absolute", after=17))
    assert "first was found after 17 programs" in make["record"](make["campaign"](found=found))["verdict_reason"]


def test_the_budget_is_that_of_the_profile(make: Record) -> None:
    assert make["record"](make["campaign"]())["budget"] == {
        "programs": 15,
        "rules": 6,
        "least": 8,
        "of_a_kind": 0,
        "patience": 5,
        "far": 0,
        "configurations": 0,
        "remember": False,
    }


def test_run_and_control_have_their_own_seconds(make: Record) -> None:
    result, control = make["campaign"](), make["campaign"](found=(make["bug"](),))
    result.seconds, control.seconds = 2.34567, 0.5
    record = make["record"](result, control)
    assert (record["seconds"], record["control"]["seconds"]) == (2.346, 0.5)


def test_a_control_must_find_what_the_run_itself_does_not_break(records: dict[str, Record]) -> None:
    assert records["fail"]["control"]["caught"]
    same = records["fail of the same property"]["control"]
    assert not same["caught"]
    assert same["property"] == records["fail of the same property"]["findings"][0]["property"]


def test_a_control_is_caught_by_its_second_finding_if_the_first_does_not_count(make: Record) -> None:
    control = make["campaign"](
        found=(make["bug"](reproducible=False), make["bug"]("every_operation_completes", after=9))
    )
    record = make["record"](make["campaign"](), control)
    assert (record["verdict"], record["control"]["property"]) == ("PASS", "every_operation_completes")
    assert record["control"]["after_programs"] == 9


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("offset", "the run itself is on the planted bug (the offset mask policy)"),
        ("partial", "the run was interrupted before the control"),
        ("no control", "the target has no counterpart"),
        ("pass", None),
    ],
)
def test_a_run_without_a_control_says_why(name: str, reason: str | None, records: dict[str, Record]) -> None:
    assert records[name]["control_reason"] == reason


def test_a_finding_is_told_whole(make: Record) -> None:
    found = make["bug"](message="layer 1: wrong", reproducible=False, after=41)
    record = make["record"](make["campaign"](found=(found, make["bug"]("positions_are_absolute"))))
    first, second = record["findings"]
    trace = first.pop("trace")
    assert trace["finding"] == {"property": first["property"], "step": 2, "message": "", "reproducible": False}
    assert (trace["program"], trace["target"]) == (first["program_json"], found.target.identity.to_json())
    assert first == {
        "property": "mask_key_axis_equals_live_keys",
        "message": "layer 1: wrong",
        "target": "reference/qwen2_vl@offset-mask variant one-layer, rows cache, weights seed 0",
        "program": "Prefill(10) ; TrimFront(4) ; Chunk(4)",
        "program_json": found.finding.program.to_json(),
        "operations": 3,
        "after_programs": 41,
        "reproducible": False,
        "replay": "kv-harness replay reports/findings/mask-1.json",
    }
    assert second["replay"] is None


def test_every_configuration_is_there_with_its_count(records: dict[str, Record]) -> None:
    rows = records["pass"]["configurations"]
    drawn = {(row["variant"], row["storage"]): row["programs"] for row in rows if row["programs"]}
    assert drawn == {("one-layer", "rows"): 1000, ("plain", "int8"): 234}
    assert len(rows) == len(targets("qwen2_vl"))
    assert rows[0]["config"]["rope_scaling"] == {"mrope_section": [2, 1, 1], "mrope_interleaved": False}


def test_what_ran_must_be_among_the_configurations(make: Record) -> None:
    one = {"variant": "one-layer", "storage": "rows", "config": {}, "options": {}}
    with pytest.raises(ValueError, match=r"ran on 'plain, int8', which is not among"):
        make["record"](make["campaign"](), configurations=[one])
    with pytest.raises(ValueError, match=r"'one-layer, rows' is given twice"):
        make["record"](make["campaign"](), configurations=[one, one])


def test_a_property_without_a_sentence_is_refused(make: Record) -> None:
    with pytest.raises(ValueError, match="no sentence for the property 'mask_key_axis_equals_live_keys'"):
        make["record"](make["campaign"](), properties=ALL[1:])


@pytest.mark.parametrize(("name", "worst"), [("nan", "nan"), ("inf", "inf"), ("number", 8.25e-7), ("pass", None)])
def test_worst(name: str, worst: object, records: dict[str, Record]) -> None:
    assert {prop["worst"] for prop in records[name]["properties"]} == {worst}


def test_plain_values() -> None:
    given = {"a": (1, np.int64(2), np.float32(0.5), True), 3: [None, float("-inf"), "x"]}
    made = plain(given)
    assert made == {"a": [1, 2, 0.5, True], "3": [None, "-inf", "x"]}
    assert [type(item) for item in made["a"]] == [int, int, float, bool]
    with pytest.raises(TypeError, match="cannot hold a object"):
        plain({"a": [object()]})
    assert plain(Fraction(1, 4)) == 0.25


def without_seconds(record: Record) -> Record:
    bare = copy.deepcopy(record)
    del bare["seconds"]
    if bare["control"] is not None:
        del bare["control"]["seconds"]
    return bare


def test_the_same_seed_gives_the_same_record(real: Callable[[str], Record], real_live: Record) -> None:
    again = real("live")
    assert again is not real_live
    assert without_seconds(again) == without_seconds(real_live)


def test_a_real_record_counts_what_ran(real_live: Record, real_offset: Record) -> None:
    assert real_live["control"]["caught"]
    assert real_live["control"]["property"] == "mask_key_axis_equals_live_keys"
    assert real_live["control"]["operations"] == len(real_live["control"]["program_json"]["operations"])
    for record in (real_live, real_offset):
        assert sum(row["programs"] for row in record["configurations"]) == record["programs"] >= 15
        assert record["coverage"]["programs"] == record["programs"]
        failed = {prop["id"] for prop in record["properties"] if prop["verdict"] == "FAIL"}
        assert failed == {finding["property"] for finding in record["findings"]}
        assert record["seconds"] > 0
    assert real_offset["findings"]
