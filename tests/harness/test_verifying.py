"""``verify``: a run as an object."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness.findings import Verdict
from harness.reporting.record import load_schema
from harness.verifying import verify


def test_a_right_target(tmp_path: Path) -> None:
    report = verify(FakeTarget(), "quick", programs=40, out=tmp_path / "o")
    assert report.verdict is Verdict.PASS and report.found == () and not (tmp_path / "o").exists()
    assert set(report.properties) == set(properties.BY_ID)
    assert report.properties["mask_key_axis_equals_live_keys"] is Verdict.PASS
    assert report.text.startswith("fake:fake: PASS: ") and "the planted bug was found after" in report.text
    assert report.markdown.startswith("# ")
    jsonschema.validate(report.record, load_schema())
    report.check()
    again = verify(FakeTarget(), "quick", programs=40, out=tmp_path / "o")
    assert again.properties == report.properties and again.text == report.text


def test_a_bug_is_an_assertion_with_a_trace(tmp_path: Path) -> None:
    report = verify(FakeTarget(bugs=frozenset({"mask leaks"})), "smoke", out=tmp_path)
    assert report.verdict is Verdict.FAIL and report.properties["mask_shows_exactly_the_visible_set"] is Verdict.FAIL
    with pytest.raises(AssertionError, match="mask_shows_exactly_the_visible_set"):
        report.check()
    (trace,) = (tmp_path / "findings").glob("mask_shows_exactly-*.json")
    assert f"kv-harness replay {trace}" in report.text
    assert report.found[0].target.identity.family == "fake"


def test_vacuous_is_no_pass(tmp_path: Path) -> None:
    """One token at a time builds no mask; a look that is too short proves nothing either."""
    report = verify(FakeTarget(mask="causal"), "smoke", programs=1, out=tmp_path)
    assert report.verdict is Verdict.VACUOUS
    with pytest.raises(AssertionError, match="VACUOUS"):
        report.check()
    report.check(strict=False)


def test_by_name(tmp_path: Path) -> None:
    report = verify("reference:nemotron_nas:plain:rows", "smoke", out=tmp_path)
    assert report.record["target"] == "reference:nemotron_nas" and report.found == ()
    assert "kv-harness run --target reference:nemotron_nas:plain:rows" in report.record["command"]


def test_what_cannot_be_verified(tmp_path: Path) -> None:
    from harness.targets.naming import TargetError

    with pytest.raises(ValueError, match="a profile is one of smoke, quick"):
        verify(FakeTarget(), "thorough")
    with pytest.raises(ValueError, match="programs must be at least 1"):
        verify(FakeTarget(), programs=0)
    with pytest.raises(ValueError, match="no target: None"):
        verify(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a seed must be a whole number"):
        verify(FakeTarget(), seed=-1)
    with pytest.raises(ValueError, match="no target was given"):
        verify([])
    with pytest.raises(TargetError, match="qwen9"):
        verify("reference:qwen9")


def test_a_policy_and_a_limit_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The historic bug is found in the target itself, and what is printed does it again."""
    report = verify("reference:nemotron_nas:plain:rows", "smoke", policy="offset", out=tmp_path)
    assert report.verdict is Verdict.FAIL and report.record["policy"] == "offset"
    assert "mask_key_axis_equals_live_keys" in {bug.finding.property_id for bug in report.found}
    assert "--policy offset" in report.record["command"] and report.record["control"] is None
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # the worker finds the package
    toy = f"wire:{sys.executable} -m harness.wire.examples.toy"
    report = verify(toy, "smoke", programs=4, limit=44, out=tmp_path)
    assert report.record["command"].endswith("--limit 44 --profile smoke --seed 0 --policy live --programs 4")
    with pytest.raises(ValueError, match="the engine has the mask policy live alone"):
        verify(toy, policy="offset")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param({"policy": "library"}, "a policy is live or offset", id="policy"),
        pytest.param({"limit": 0}, "a limit must lie in", id="limit-0"),
        pytest.param({"limit": float("nan")}, "a limit must lie in", id="limit-nan"),
        pytest.param({"limit": "60"}, "a limit must lie in", id="limit-text"),
    ],
)
def test_a_policy_or_limit_that_is_none(options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        verify("reference:nemotron_nas:plain:rows", **options)
    with pytest.raises(ValueError, match="an object has its own"):
        verify(FakeTarget(), policy="offset")
