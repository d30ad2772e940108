"""The acceptance table, from results made up for it: what makes a verdict worse, and what does not."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import properties
from harness.findings import Verdict
from harness.validation.measuring import greedy
from harness.validation.plan import Asked, make_plan
from harness.validation.sides import EngineError, with_control
from harness.validation.verdict import acceptance

PLAN = make_plan(Asked(16, 8, 40), images=False)
JUDGED = tuple(properties.BY_ID[name] for name in ("mask_key_axis_equals_live_keys", "same_program_same_bytes"))
MASK, A_A = (prop.id for prop in JUDGED)
SIDES = with_control("live", "live")
Results = dict[str, dict[str, dict[str, Any]]]


def _result(caught: bool, trimmed: bool = False) -> dict[str, Any]:
    counted = {"steps": 3, "decisive": 2, "worst": None, "doubt": None}
    return {
        "properties": {prop.id: dict(counted) for prop in JUDGED},
        "findings": [{"property": MASK, "message": "the mask has 32 keys"}] if caught else [],
        "forwards": 5,
        "blind": 0,
        "digests": ["a", "b", "c", "x", "y"] if trimmed else ["a", "b", "c", "d", "e"],
        "greedy": [[1, -1], [2]],
        "stopped": None,
        "crash": None,
    }


@pytest.fixture
def results() -> Results:
    """Of a right target, with its control caught wherever it must be."""
    return {
        side: {
            planned.name: _result(side == "control" and planned.name != "untrimmed", planned.name != "untrimmed")
            for planned in PLAN.programs
        }
        for side in SIDES
    }


def _verdict(results: Results) -> Verdict:
    return acceptance(PLAN, SIDES, JUDGED, results)[1]


def _row(results: Results, start: str) -> tuple[Verdict, str, int]:
    rows = acceptance(PLAN, SIDES, JUDGED, results)[0]
    row = next(row for row in rows if row.criterion.startswith(start))
    return row.result, row.evidence, row.decisive


def test_a_right_target_passes(results: Results) -> None:
    rows, verdict, reason = acceptance(PLAN, SIDES, JUDGED, results)
    assert (verdict, len(rows)) == (Verdict.PASS, 8)
    assert "the planted bug was caught" in reason
    assert _row(results, "greedy")[2] == 6  # an undecided token counts for nothing


def test_a_finding_fails_whatever_else_happened(results: Results) -> None:
    results["after"]["bounded"] = _result(True)
    results["control"]["bounded"]["findings"] = []
    assert _verdict(results) is Verdict.FAIL
    assert _row(results, MASK)[:2] == (Verdict.FAIL, "the mask has 32 keys")


@pytest.mark.parametrize("program", ["bounded", "sinks_and_rollback"])
def test_a_control_that_is_missed_in_one_program_is_vacuous(results: Results, program: str) -> None:
    results["control"][program]["findings"] = []
    assert _verdict(results) is Verdict.VACUOUS
    assert program in _row(results, "the offset mask policy")[1]


def test_the_control_must_break_the_width_of_the_mask(results: Results) -> None:
    raised = {"property": "every_operation_completes", "message": "raised"}
    results["control"]["bounded"]["findings"] = [raised]
    assert _verdict(results) is Verdict.VACUOUS
    # A mask that is added up by hand raises before it gets to an attention call.
    results["control"]["bounded"]["findings"] = [raised | {"message": "[broadcast_shapes] Shapes (8,32) and (8,24)"}]
    assert _verdict(results) is Verdict.PASS


def test_a_property_without_a_decisive_step_is_vacuous(results: Results) -> None:
    for result in results["after"].values():
        result["properties"][MASK]["decisive"] = 0
    assert _verdict(results) is Verdict.VACUOUS
    results["after"]["bounded"]["properties"][MASK]["decisive"] = 1
    assert _verdict(results) is Verdict.PASS


def test_a_property_that_was_never_asked_is_vacuous(results: Results) -> None:
    for result in results["after"].values():
        del result["properties"][MASK]
    assert _row(results, MASK)[0] is Verdict.VACUOUS


def test_one_blind_forward_makes_what_rests_on_the_probe_inconclusive(results: Results) -> None:
    results["after"]["bounded"]["blind"] = 1
    assert _row(results, MASK)[0] is Verdict.INCONCLUSIVE and _row(results, A_A)[0] is Verdict.PASS
    assert _verdict(results) is Verdict.INCONCLUSIVE


def test_a_against_a_is_a_doubt_and_no_finding(results: Results) -> None:
    results["after"]["untrimmed"]["findings"] = [{"property": A_A, "message": "differs"}]
    for start in (A_A, "untrimmed logits", "greedy"):
        assert _row(results, start)[0] is Verdict.INCONCLUSIVE
    assert _verdict(results) is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("program", ["untrimmed", "bounded"])
def test_the_before_side_needs_its_own_a_against_a(results: Results, program: str) -> None:
    """What a noisy side gives is another thing every time: that the judged one gives yet another is no finding."""
    results["before"]["untrimmed"]["digests"] = ["a", "other"]
    assert _verdict(results) is Verdict.FAIL
    results["before"][program]["findings"] = [{"property": A_A, "message": "forward 1 differs"}]
    assert _row(results, "the before side repeats")[:2] == (Verdict.INCONCLUSIVE, "forward 1 differs")
    for start in ("untrimmed logits", "greedy"):
        assert _row(results, start)[:2] == (
            Verdict.INCONCLUSIVE,
            f"the before side does not repeat itself, in {program}",
        )
    assert _row(results, A_A)[0] is Verdict.PASS
    assert _verdict(results) is Verdict.INCONCLUSIVE


def test_a_before_side_that_was_never_repeated_is_vacuous(results: Results) -> None:
    for result in results["before"].values():
        del result["properties"][A_A]
    assert _row(results, "the before side repeats")[0] is _verdict(results) is Verdict.VACUOUS


def test_a_control_that_does_not_repeat_itself_is_compared_with_nothing(results: Results) -> None:
    results["control"]["bounded"]["findings"].append({"property": A_A, "message": "differs"})
    assert _verdict(results) is Verdict.PASS


def test_a_reader_that_does_not_repeat_itself_proves_no_weights_wrong(results: Results) -> None:
    reader = {"untrimmed": _result(False) | {"greedy": [[7, 7], [7]]}}
    assert _row(results | {"reader": reader}, "the weights are")[0] is Verdict.FAIL
    reader["untrimmed"]["findings"] = [{"property": A_A, "message": "differs"}]
    assert _row(results | {"reader": reader}, "the weights are")[0] is Verdict.INCONCLUSIVE


@pytest.mark.parametrize("digests", [["a", "c"], ["a"], []])
def test_untrimmed_logits_that_differ_from_before_fail(results: Results, digests: list[str]) -> None:
    results["before"]["untrimmed"]["digests"] = digests
    assert _row(results, "untrimmed logits")[0] is Verdict.FAIL
    assert _verdict(results) is Verdict.FAIL


def test_logits_that_do_not_miss_what_was_trimmed_prove_nothing(results: Results) -> None:
    """Weights of zeros, or an attention that reaches no logit: every comparison of outputs would hold."""
    results["after"]["bounded"]["digests"] = results["after"]["untrimmed"]["digests"]
    assert _row(results, "logits depend")[0] is Verdict.VACUOUS
    assert _verdict(results) is Verdict.VACUOUS


def test_trimmed_logits_may_differ_from_before(results: Results) -> None:
    results["before"]["bounded"]["digests"] = ["a"]
    assert _verdict(results) is Verdict.PASS


def test_greedy_tokens_count_where_both_sides_are_decided(results: Results) -> None:
    other = copy.deepcopy(results)
    other["before"]["bounded"]["greedy"] = [[1, 7], [-1]]
    assert _row(other, "greedy")[0] is Verdict.PASS and _row(other, "greedy")[2] == 5
    other["before"]["bounded"]["greedy"] = [[1, 7], [3]]
    assert _row(other, "greedy")[0] is Verdict.FAIL and "bounded" in _row(other, "greedy")[1]
    for result in results["before"].values():
        result["greedy"] = [[-1, -1], [-1]]
    assert _row(results, "greedy")[0] is Verdict.VACUOUS


def test_the_offset_policy_is_a_side_of_every_validation() -> None:
    assert with_control(None, "live") == {"after": "live", "control": "offset"}
    assert with_control("offset", "live") == {"after": "live", "before": "offset"}
    assert with_control("live", "live")["control"] == "offset"
    assert with_control(None, "offset") == {"after": "offset"}


def test_a_greedy_token_is_decided_by_the_gap_of_the_two_largest_logits() -> None:
    row = np.zeros(100, np.float32)
    row[:50] = 1.0
    row[3], row[7] = 5.0, 4.9
    near, far = row.copy(), row.copy()
    near[7] = 5.0 - 0.04 * near.std()
    far[7] = 5.0 - 0.06 * far.std()
    assert greedy(np.stack([near, far, np.full(100, 2.0, np.float32)])) == [-1, 3, -1]
    assert greedy(np.zeros((2, 1), np.float32)) == [-1, -1]


def test_an_engine_without_another_policy_proves_nothing(results: Results) -> None:
    """Nothing shows there that the bug would be found."""
    sides = with_control(None, "live", ("live",))
    assert sides == {"after": "live"}
    rows, verdict, _ = acceptance(PLAN, sides, JUDGED, {"after": results["after"]})
    assert verdict is Verdict.VACUOUS and "no bug could be planted" in rows[1].evidence
    with pytest.raises(EngineError, match="argument --after: this engine has live, not offset"):
        with_control(None, "offset", ("live",))


def test_other_caches_are_compared_by_their_tokens_alone(results: Results) -> None:
    """They hand their rows to attention in another order, and cannot run what trims a front."""
    before = {"untrimmed": results["before"]["untrimmed"] | {"digests": ["other"] * 5}}
    sides = with_control("library", "live", ("live", "offset", "library"))
    rows, verdict, _ = acceptance(PLAN, sides, JUDGED, {**results, "before": before})
    assert verdict is Verdict.PASS and not any(row.criterion.startswith("untrimmed logits") for row in rows)
    assert next(row.decisive for row in rows if row.criterion.startswith("greedy")) == 2
