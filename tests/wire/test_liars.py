"""An engine whose logits are not of what it tells: no PASS, and of right ones nothing is thought."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from harness.felt import CONTEXT, TRIMS, unfelt
from harness.findings import Verdict
from harness.reporting.verdicts import UNCHECKED
from harness.targets.naming import Asked, resolve
from harness.verifying import Report, verify

HERE = Path(__file__).parent
COMPARED = ("same_program_same_bytes", "rollback_equals_never_speculated", "chunks_equal_one_shot")


def judged(lies: str, out: Path) -> Report:
    return verify(f"wire:{sys.executable} {HERE / 'lying.py'} {lies}", "smoke", programs=40, out=out)


def reason(report: Report, prop: str) -> str:
    return next(row["reason"] or "" for row in report.record["properties"] if row["id"] == prop)


@pytest.mark.parametrize("lies", ["constant", "token", "constant,values,rows", "constant,nan"])
def test_logits_of_nothing_are_vacuous(lies: str, tmp_path: Path) -> None:
    report = judged(lies, tmp_path)
    assert report.verdict is Verdict.VACUOUS, report.text
    for prop in COMPARED:
        assert report.properties[prop] is Verdict.VACUOUS and CONTEXT in reason(report, prop)
    made_up = {"values": ["attention_equals_float64"], "rows": ["cached_rows_stay_what_they_were"]}
    made_up["nan"], made_up["rows"] = made_up["values"], [*made_up["rows"], "outputs_equal_the_cache_free_forward"]
    for lie in set(lies.split(",")) & set(made_up):
        assert all(report.properties[prop] is Verdict.VACUOUS for prop in made_up[lie]), report.properties


def test_a_trim_that_moves_counters_is_vacuous(tmp_path: Path) -> None:
    report = judged("trims", tmp_path)
    assert report.verdict is Verdict.VACUOUS, report.text
    for prop in ("trim_reports_what_it_removed", "keys_equal_ledger_live_length", "mask_key_axis_equals_live_keys"):
        assert report.properties[prop] is Verdict.VACUOUS and TRIMS in reason(report, prop)
    assert report.properties["chunks_equal_one_shot"] is Verdict.PASS  # nothing is trimmed there


def test_the_toy_passes_and_says_what_nobody_checked(tmp_path: Path) -> None:
    report = judged("none", tmp_path)
    assert report.verdict is Verdict.PASS, report.text
    assert UNCHECKED in report.record["verdict_reason"]


FAMILIES = ("mistral4", "nemotron_nas", "qwen2_vl", "cohere2", "olmo3", "minicpm3", "qwen3_vl_moe", "qwen3_vl+images")


@pytest.mark.parametrize("family", FAMILIES)
def test_right_targets_are_felt(family: str) -> None:
    """Drawn ones, too: of cohere2 there is one whose windows show each token itself alone."""
    for target in resolve(f"reference:{family}", Asked(configurations=3)).targets:
        assert unfelt(target) == {}, target.identity.full_name
