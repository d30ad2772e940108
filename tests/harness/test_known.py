"""Findings that are recorded: named, told from others, and still findings."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jsonschema
import pytest

from harness import cli, known
from harness.campaign import CampaignResult, FoundBug, PropertyResult
from harness.findings import Finding, Verdict, Violation
from harness.known_failures import known_failures
from harness.known_states import STATES
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Operation,
    Prefill,
    Program,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.profiles import PROFILES
from harness.reporting import load_schema
from harness.reporting.verdicts import Outcome, verdict_of, with_known
from harness.rules import CacheRule
from harness.tally import PropertyTally, Tally
from harness.target import TargetIdentity

LENGTH = "keys_equal_ledger_live_length"
COMPLETES = "every_operation_completes"
SAID = "Rollback(1) raised TypeError: 'NoneType' object is not subscriptable"
BATCHED: tuple[Operation, ...] = (Prefill(1), Batch((0, 1)), Rollback(1, 1))
IDENTITY = TargetIdentity("mlx_lm", "nemotron_nas", "tiny", "library", "rows", 0)


@pytest.fixture(autouse=True)
def _release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "installed", lambda _: "0.32.2")


def bug(
    message: str = SAID,
    operations: tuple[Operation, ...] = BATCHED,
    fails: str = COMPLETES,
    caches: str = "",
    window: int | None = None,
    **identity: Any,
) -> FoundBug:
    rules = (None, CacheRule(window=window) if window else None)
    target = cast(Any, SimpleNamespace(identity=replace(IDENTITY, **identity), caches=caches, rules=rules))
    finding = Finding(fails, "x", Violation(2, message), Program(operations, ("pool", "pool")))
    return FoundBug(finding, target, True, 1)


def test_the_recorded_one_is_named_with_what_it_is_matched_by() -> None:
    assert known.known_of(bug()) == {
        "id": "nemotron_nas_batch_of_unread_caches",
        "title": "a row of nemotron-nas cannot leave a batch, nor a ragged batch be finished",
        "upstream": "",
        "matched": "property, family, mlx-lm 0.32.2, operation batch, message",
    }


@pytest.mark.parametrize(
    "other",
    [
        {"message": "Chunk(2) raised ValueError: [broadcast_shapes]"},
        {"operations": (Prefill(1), Prefill(1, 1), Rollback(1, 1))},
        {"fails": "positions_are_absolute"},
        {"family": "llama"},
        {"kind": "wire"},
        {"kind": "reference"},
        {"policy": "offset"},
    ],
    ids=lambda other: f"another {next(iter(other))} {next(iter(other.values()))!s:.10}",
)
def test_another_one_is_not(other: dict[str, Any]) -> None:
    assert known.known_of(bug(**other)) is None


@pytest.mark.parametrize(
    ("given", "matched"),
    [
        pytest.param({}, "what follows from it, family, mlx-lm 0.32.2, operation batch, ragged", id="follows"),
        pytest.param(
            {"fails": "batch_rows_equal_solo_runs"},
            "property, family, mlx-lm 0.32.2, operation batch, ragged",
            id="itself",
        ),
        pytest.param({"operations": (Prefill(1), Prefill(1, 1))}, None, id="no-batch"),
        pytest.param({"fails": "positions_are_absolute"}, None, id="another-property"),
        pytest.param({"family": "llama"}, None, id="another-family"),
    ],
)
def test_what_follows_from_a_recorded_bug_is_that_bug(given: dict[str, Any], matched: str | None) -> None:
    found = known.known_of(bug(**{"message": "x", "fails": "chunks_equal_one_shot", "family": "baichuan_m1"} | given))
    assert (None if found is None else (found["id"], found["matched"])) == (
        None if matched is None else ("baichuan_m1_ragged_batch", matched)
    )


def test_nor_one_of_a_release_that_no_record_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "installed", lambda _: "0.99.0")
    assert known.known_of(bug()) is None


@pytest.mark.parametrize(
    ("caches", "is_known"),
    [
        ("max-kv-size=9", True),
        ("batch-generator@max-kv-size=9", True),
        ("", False),
        ("speculative", False),
        ("batch-generator", False),
    ],
)
def test_a_record_of_bounded_caches_speaks_of_no_others(caches: str, is_known: bool) -> None:
    """Whatever the folder of a checkpoint is called."""
    shows = "mask_shows_exactly_the_visible_set"
    found = bug("x", (Prefill(10),), shows, caches, 9, family="qwen3", variant="tiny@max-kv-size=9")
    assert ((told := known.known_of(found)) is not None) is is_known
    assert told is None or "caches @max-kv-size=" in told["matched"]


def test_a_record_of_two_conditions_wants_both() -> None:
    told = [
        known.known_of(bug("x", (Prefill(9),), LENGTH, caches, 9, family="qwen3"))
        for caches in ("batch-generator-in-pieces@max-kv-size=9", "batch-generator", "max-kv-size=9", "")
    ]
    assert told[0] is not None and told[0]["id"] == "batch_generator_drops_sinks" and told[1:] == [None, None, None]
    assert "caches @batch-generator@max-kv-size=" in told[0]["matched"]


def test_what_may_follow_from_two_bugs_says_so() -> None:
    """Its own bug has one name; of a consequence nobody knows, and both are told."""
    given = "outputs_equal_the_cache_free_forward"
    told = known.known_of(bug("x", (Prefill(13),), given, "batch-generator@max-kv-size=12", 12, family="qwen3"))
    assert told is not None and told["id"] == "batch_generator_drops_sinks"
    assert told["matched"].endswith("(or it follows from rotating_chunk_hides_sinks)")
    alone = known.known_of(bug("x", (Prefill(13),), given, "max-kv-size=12", 12, family="qwen3"))
    assert alone is not None and alone["id"] == "rotating_chunk_hides_sinks" and "(or" not in alone["matched"]


@pytest.mark.parametrize(
    "operations", [(Prefill(11),), (Prefill(10), Decode(1)), (Prefill(11), Rollback(2), Decode(2))]
)
def test_a_bug_in_front_of_the_bound_is_none_of_those_behind_it(operations: tuple[Operation, ...]) -> None:
    """Whatever masks and rows do before a ring turns is news."""
    for name in ("mask_shows_exactly_the_visible_set", LENGTH, "outputs_equal_the_cache_free_forward"):
        given = ("x", operations, name, "batch-generator@max-kv-size=12")
        assert known.known_of(bug(*given, 12, family="qwen3")) is None
        assert known.known_of(bug(*given, 11, family="qwen3")) is not None


@pytest.mark.parametrize(
    ("operations", "is_known"),
    [
        ((Prefill(2), Prefill(2, 1), Batch((0, 1)), BatchDecode(1)), False),
        ((Prefill(2), Batch((0, 1)), BatchDecode(1)), True),
        ((Batch((0, 1)), BatchForward((2, 1))), True),
        ((Batch((0, 1)), BatchForward((2, 2)), BatchDecode(3)), False),
        ((Batch((0, 1)), BatchForward((2,)), Rollback(1, 1), BatchDecode(1)), True),
        ((Prefill(3), Fork(1), Batch((0, 1)), BatchDecode(1)), False),
        ((Prefill(3), Fork(1), Chunk(2, 1), Batch((0, 1)), BatchDecode(1)), True),
        ((Batch((0, 1)), Verify(3, 1), BatchDecode(1)), True),
        ((Prefill(2), Snapshot(0), Decode(1), Restore(0), Prefill(2, 1), Batch((0, 1)), BatchDecode(1)), False),
        ((Prefill(3), Prefill(3, 1), TrimFront(1), Batch((0, 1)), BatchDecode(1)), True),
    ],
    ids=[
        "alike",
        "one-empty",
        "right-padded",
        "alike-in-forwards",
        "rolled-back",
        "forked",
        "forked-and-on",
        "verified",
        "restored",
        "trimmed",
    ],
)
def test_a_record_of_ragged_batches_speaks_of_no_others(operations: tuple[Operation, ...], is_known: bool) -> None:
    found = known.known_of(bug("x", operations, "batch_rows_equal_solo_runs", family="nemotron_h"))
    assert (found is not None) is is_known


def test_every_record_matches_what_it_says_and_names_operations_that_there_are() -> None:
    from harness.operations import OPERATIONS

    codes = {kind.code for kind in OPERATIONS}
    assert [each.id for each in known_failures() if not set(each.operations) <= codes] == []
    assert [each.id for each in known_failures() if not set(each.states) <= set(STATES)] == []


def result(*found: FoundBug) -> CampaignResult:
    rows = [
        PropertyResult(COMPLETES, Verdict.FAIL, PropertyTally()),
        PropertyResult("x", Verdict.PASS, PropertyTally()),
    ]
    return CampaignResult("hand", PROFILES["smoke"], 0, Tally(), rows, list(found))


def test_known_hides_no_other_finding_of_its_property() -> None:
    verdicts = [
        with_known(result(*found), known.known_of).properties[0].verdict
        for found in ((bug(),), (bug(), bug("else")), (bug("else"),))
    ]
    assert verdicts == [Verdict.KNOWN, Verdict.FAIL, Verdict.FAIL]


@pytest.mark.parametrize(
    ("worse", "cut", "control", "verdict"),
    [
        (Verdict.PASS, None, None, Verdict.KNOWN),
        (Verdict.VACUOUS, None, None, Verdict.KNOWN),
        (Verdict.FAIL, None, None, Verdict.FAIL),
        (Verdict.INCONCLUSIVE, None, None, Verdict.INCONCLUSIVE),
        (Verdict.PASS, "interrupted", None, Verdict.INCONCLUSIVE),
        (Verdict.PASS, None, Outcome("offset", (), 5), Verdict.KNOWN),
    ],
    ids=["alone", "beside vacuous", "beside fail", "beside inconclusive", "cut", "control missed"],
)
def test_the_verdict_of_the_whole(worse: Verdict, cut: str | None, control: Outcome | None, verdict: Verdict) -> None:
    met, reason = verdict_of(Outcome("live", [("a", Verdict.KNOWN, 5), ("b", worse, 0)], 9, 1, cut, control))
    assert met is verdict
    assert ("1 of 2 properties fails as recorded: a" in reason) == (worse not in (Verdict.FAIL, Verdict.INCONCLUSIVE))
    assert ("the planted bug was not caught" in reason) == (control is not None)


def test_a_run_names_them_and_ends_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")
    if mlx_lm.__version__ != "0.32.2":
        pytest.skip("the records of nemotron_nas are of 0.32.2")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "--target", "mlx_lm:nemotron_nas", "--profile", "smoke"]) == 1
    out = capsys.readouterr().out
    assert "KNOWN  every_operation_completes" in out and "      known     nemotron_nas_batch_of_unread_caches: " in out
    record = json.loads(Path("reports/targets/mlx_lm-nemotron_nas.json").read_text())
    jsonschema.validate(record, load_schema())
    assert record["verdict"] == "KNOWN" and len({found["known"]["id"] for found in record["findings"]}) == 3
    text = Path("reports/targets/mlx_lm-nemotron_nas.md").read_text()
    assert "**KNOWN**: 3 of " in text and "Known: nemotron_nas_trim_returns_zero: trim_prompt_cache returns 0" in text
    assert "every_operation_completes is KNOWN: recorded as nemotron_nas_batch_of_unread_caches" in text
    assert cli.main(["report", "--history", "--issue", "issue.md"]) == 0
    assert Path("issue.md").read_text() == ""  # what is recorded is no news
    assert "| KNOWN" in Path("reports/index.md").read_text()
