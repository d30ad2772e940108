"""Findings of a validation become small, by a number of programs that no clock decides; what does not, is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness.execution import Execution
from harness.findings import Finding, Violation
from harness.judging import Judgement, Property
from harness.steps import Step
from harness.target import Target
from harness.validation.journal import Journal
from harness.validation.measuring import measure
from harness.validation.plan import Asked, make_plan
from harness.validation.shrinking import LEAST, MOST, MOST_HUNG, NOT_AGAIN, _most, of_record, shrink_all

PLAN = make_plan(Asked(16, 8, 40, 2), images=False)
WIDTH = "mask_key_axis_equals_live_keys"


class Wide(Property):
    """Fails in forwards of 30 tokens or more alone."""

    id = "wide_forwards_are_wrong"
    sentence = "no forward has 30 tokens"
    decisive_when = "always"

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        wide = [each for each in step.forwards if len(each.append.positions) >= 30]
        return Judgement(1, 1, violation=Violation(step.index, "30 tokens") if wide else None)


def shrunk(
    tmp_path: Path, target: Target, judge: str, plan: Any = PLAN, shrink_on: Target | None = None, name: str = "bounded"
) -> tuple[list[dict[str, Any]], list[str], list[Finding]]:
    """The findings as a report has them, what was said, and the findings that were kept."""
    said: list[str] = []
    kept: list[Finding] = []

    def keep(run: Execution, finding: Finding) -> str:
        kept.append(finding)
        return f"kv-harness replay {len(kept)}"

    planned = next(each for each in plan.programs if each.name == name)
    journal = Journal(tmp_path / "x.partial.jsonl", "key")
    tick: Callable[[str], None] = lambda _: None  # noqa: E731
    journal.add("after", name, measure(target, planned, (properties.BY_ID[judge],), keep, tick))
    shrink_all(plan, journal, lambda path: shrink_on or target, keep, lambda name: tick, said.append)
    again = Journal(tmp_path / "x.partial.jsonl", "key")
    assert again.steps == journal.steps  # and all of it is on the disk
    before = list(said)
    shrink_all(plan, again, lambda path: shrink_on or target, keep, lambda name: tick, said.append)
    assert said == before  # what is done is not done again
    return [of_record(found) for found in journal.steps["after", name]["findings"]], said, kept


def test_a_mask_of_the_wrong_width(tmp_path: Path) -> None:
    (found,), (said,), kept = shrunk(tmp_path, FakeTarget(policy="offset"), WIDTH)
    assert found["program_text"] == "Prefill(1) ; TrimFront(1) ; Chunk(2)"
    assert "the mask has 3 keys, attention received 2" in found["message"]
    assert found["replay"] == "kv-harness replay 2" and found["trace"]["program"]["operations"][1]["op"] == "trim_front"
    original = found["original"]
    assert original["program_text"].startswith("Prefill(8) ; EnforceMaxKvSize(16) ; Chunk(8)")
    assert "the mask has 32 keys, attention received 24" in original["message"] and original["replay"].endswith("1")
    assert int(said.partition(": ")[2].split()[0]) <= MOST + 12 and said.endswith(found["program_text"])
    assert [each.reproducible for each in kept] == [True, True]


@pytest.mark.parametrize(
    ("bug", "judge", "operations"),
    [
        ("mask leaks", "mask_shows_exactly_the_visible_set", 1),
        ("positions from live_len", "positions_are_absolute", 3),
        ("rows change in a trim", "cached_rows_stay_what_they_were", 2),
        ("bias under the live policy", "untrimmed_outputs_are_byte_identical", 1),
        ("logits without the oldest row after a trim", "outputs_equal_the_cache_free_forward", 3),
    ],
    ids=["content", "positions", "rows", "the other policy, at the end", "without a cache, at the end"],
)
def test_what_other_properties_find(bug: Any, judge: str, operations: int, tmp_path: Path) -> None:
    """Also those that judge a run as a whole, so that no step says where it broke."""
    (found,), _, kept = shrunk(tmp_path, FakeTarget(bugs=frozenset({bug})), judge)
    assert "original" in found and found["property"] == judge
    assert len(kept[1].program.operations) <= operations < len(kept[0].program.operations)


def test_what_needs_its_size_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(properties.BY_ID, Wide.id, Wide())
    plan = make_plan(Asked(128, 64, 512, 8), images=False)
    (found,), _, _ = shrunk(tmp_path, FakeTarget(), Wide.id, plan)
    assert found["program_text"] == "Prefill(30)" and "original" in found


def test_what_is_small_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.validation.shrinking.reduce_finding", lambda target, finding, *_: (finding, True))
    monkeypatch.setattr("harness.validation.shrinking.smaller", lambda *_: [])
    (found,), (said,), _ = shrunk(tmp_path, FakeTarget(policy="offset"), WIDTH)
    assert "original" not in found and found["replay"].endswith(" 1") and said.endswith("nothing smaller fails")


def test_what_does_not_come_back_is_told(tmp_path: Path) -> None:
    """A replay cannot judge it, so its trace says so as well."""
    (found,), _, kept = shrunk(tmp_path, FakeTarget(policy="offset"), WIDTH, shrink_on=FakeTarget())
    assert found["message"].endswith(f"chunk of 8) ({NOT_AGAIN})") and found["replay"].endswith(" 2")
    assert found["program_text"].startswith("Prefill(8) ; Enforce") and "original" not in found
    assert found["trace"]["finding"]["reproducible"] is False and not kept[1].reproducible
    assert kept[1].message == kept[0].message


def test_nothing_is_shrunk_where_nothing_was_found(tmp_path: Path) -> None:
    for name in ("untrimmed", "bounded"):
        assert shrunk(tmp_path, FakeTarget(), WIDTH, name=name) == ([], [], [])


def test_a_target_that_does_not_repeat_itself_is_not_searched(tmp_path: Path) -> None:
    found, said, _ = shrunk(tmp_path, FakeTarget(bugs=frozenset({"noise"})), "same_program_same_bytes")
    assert len(found) == 1 and said == []


def test_large_programs_and_engines_that_hang_get_few_tries() -> None:
    program = PLAN.programs[1].program
    finding = Finding(WIDTH, "t", Violation(0, "m"), program)
    assert _most(finding) == MOST
    whole = make_plan(Asked(1024, 512, 4096, 0), images=False).programs[1].program
    assert _most(dataclasses.replace(finding, program=whole)) == LEAST
    hung = dataclasses.replace(finding, violation=Violation(0, "Chunk(2) raised EngineHung: no answer in 60 s"))
    assert _most(hung) == MOST_HUNG < LEAST
