"""Campaigns on fake targets: shares, searches, and verdicts."""

from __future__ import annotations

from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget
from kv_harness_on_fakes import (
    ATTENDED,
    CONTENT,
    LENGTHS,
    NEVER,
    POSITIONS,
    REMOVED,
    ROWS,
    SAME,
    SMALL,
    UNTRIMMED,
    WIDTH,
    campaign,
    fake,
    quirky,
    verdicts,
)

import harness.campaign as campaign_module
import properties
from harness.campaign import run_campaign
from harness.findings import Verdict
from harness.profiles import Profile
from harness.target import Capability

TINY = Profile("tiny", programs=4, operations=3, shrink=False)


def test_a_right_target_passes_everything() -> None:
    result = campaign(fake(), profile=Profile("p", programs=40, operations=8, shrink=False), seed=1)
    assert set(verdicts(result).values()) == {Verdict.PASS} and list(verdicts(result)) == [p.id for p in properties.ALL]
    assert result.verdict is Verdict.PASS and result.found == [] and not result.partial
    assert result.tally.coverage.programs >= 40
    for one in result.properties:
        assert 0 < one.tally.decisive_steps <= one.tally.steps and one.tally.examples <= result.tally.coverage.programs
    cover = result.tally.coverage
    assert cover.chunk_after_trim and cover.trimmed_to_zero and cover.rolled_back and cover.model_owned
    assert cover.blind_forwards == 0 and cover.stopped_by_error == 0


@pytest.mark.parametrize("programs", [1, 2, 15])
def test_at_least_the_programs_of_the_profile_are_run(programs: int) -> None:
    told: list[int] = []
    result = campaign(fake(), profile=Profile("p", programs, 4, shrink=False), progress=told.append)
    total = result.tally.coverage.programs
    assert total >= max(programs, Profile("p", 1, 1).least)
    assert told == sorted(told) and set(told) == set(range(1, total + 1))  # after every program, and every search


@pytest.mark.parametrize(("programs", "least", "share"), [(30, 8, 10), (31, 8, 11), (5, 8, 8), (1, 1, 1)])
def test_every_configuration_gets_its_share_and_no_less_than_the_least(
    programs: int, least: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    search = campaign_module._search
    monkeypatch.setattr(
        campaign_module,
        "_search",
        lambda machine, profile, db: (asked.append(profile.programs), search(machine, profile, db)),
    )
    names = ("a", "b", "c")
    profile = Profile("p", programs, 4, shrink=False, least=least, patience=0)
    result = campaign(*(fake(variant=name) for name in names), profile=profile)
    assert asked == [share] * 3
    drawn = result.tally.targets
    assert set(drawn) == {f"{name}, rows" for name in names} and min(drawn.values()) >= share
    assert sum(drawn.values()) == result.tally.coverage.programs


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """What the seed of every search is derived from."""
    asked: list[tuple[object, ...]] = []
    derive = campaign_module.derive_seed

    def noted(*parts: Any) -> int:
        asked.append(parts)
        return derive(*parts)

    monkeypatch.setattr(campaign_module, "derive_seed", noted)
    return asked


@pytest.mark.parametrize("patience", [0, 1, 4])
def test_a_configuration_that_decides_nothing_gets_more_searches_but_not_for_ever(
    patience: int, seeds: list[tuple[object, ...]]
) -> None:
    profile = Profile("p", 6, 5, shrink=False, patience=patience)
    result = campaign(fake(variant="a", mask="causal"), fake(variant="b", mask="causal"), profile=profile, seed=5)
    assert seeds == [(5, "fake", number, search) for number in (0, 1) for search in range(patience + 1)]
    assert verdicts(result)[WIDTH] is Verdict.VACUOUS
    assert min(result.tally.targets.values()) >= (patience + 1) * profile.least


def test_a_configuration_on_which_everything_is_decisive_gets_one_search(seeds: list[tuple[object, ...]]) -> None:
    profile = Profile("p", 40, 8, shrink=False)
    assert campaign(fake(), profile=profile).verdict is Verdict.PASS
    assert seeds == [(0, "fake", 0, 0)]


def test_patience_ends_as_soon_as_everything_is_decisive(seeds: list[tuple[object, ...]]) -> None:
    """Few and short programs: some search reaches what the first ones did not."""
    profile = Profile("p", 3, 2, shrink=False, least=1, patience=100)
    assert campaign(fake(), profile=profile).verdict is Verdict.PASS
    assert seeds == [(0, "fake", 0, search) for search in range(len(seeds))] and 1 < len(seeds) < 100


def test_a_finding_leads_to_another_search_and_costs_no_patience(seeds: list[tuple[object, ...]]) -> None:
    result = campaign(fake("mask leaks", "reports zero removed"), profile=Profile("p", 20, 6, shrink=False, patience=0))
    assert len(result.found) == 2 and seeds == [(0, "fake", 0, search) for search in range(3)]


def test_one_configuration_does_not_speak_for_another() -> None:
    """Where one has no decisive step the property is VACUOUS, however many the other has, and the reason names it."""
    result = campaign(fake(variant="right"), fake(variant="silent", mask="causal"))
    assert {one for one, verdict in verdicts(result).items() if verdict is Verdict.VACUOUS} == {
        WIDTH,
        CONTENT,
        UNTRIMMED,
    }
    for one in result.properties:
        assert sum(one.tally.by_target.values()) == one.tally.decisive_steps
        assert set(one.tally.by_target) <= {"right, rows", "silent, rows"}
        assert one.tally.by_target["right, rows"] > 0
        if one.verdict is Verdict.VACUOUS:
            assert one.tally.by_target.get("silent, rows", 0) == 0
            assert one.reason == (
                "no decisive step on 1 of 2 configurations (silent, rows): decisive would be: "
                + properties.BY_ID[one.id].decisive_when
            )


def test_a_configuration_that_cannot_be_judged_does_not_count() -> None:
    able, unable = fake(variant="able"), fake(variant="unable", lacks=frozenset({Capability.ATTENTION}))
    result = campaign(able, unable, profile=Profile("p", 40, 8, shrink=False))
    assert result.verdict is Verdict.PASS
    for one in result.properties:
        if Capability.ATTENTION in properties.BY_ID[one.id].needs:
            assert set(one.tally.by_target) == {"able, rows"}


def test_every_target_gets_programs() -> None:
    result = campaign(*(fake(mask=mask) for mask in ("bool", "additive")), profile=TINY)
    opened: list[str] = []
    targets = [fake(hook=lambda name=name: opened.append(name)) for name in ("a", "b", "c")]
    campaign(*targets, profile=TINY)
    assert set(opened) == {"a", "b", "c"}
    assert result.tally.coverage.programs >= TINY.programs


@pytest.mark.parametrize("shrink", [False, True])
def test_the_offset_mask_is_found_and_small(shrink: bool) -> None:
    result = campaign(fake(policy="offset"), profile=Profile("p", programs=12, operations=6, shrink=shrink))
    assert verdicts(result)[WIDTH] is Verdict.FAIL and result.verdict is Verdict.FAIL
    (bug,) = [bug for bug in result.found if bug.finding.property_id == WIDTH]
    assert bug.reproducible and bug.after >= 1 and bug.target.identity.policy == "offset"
    assert len(bug.finding.program.operations) <= 3
    assert result.tally.properties[WIDTH].violations >= 1


def test_two_bugs_at_once_are_both_reported_and_the_rest_keeps_its_verdict() -> None:
    result = campaign(fake("mask leaks", "reports zero removed", "positions from live_len"))
    found = {bug.finding.property_id for bug in result.found}
    assert found == {CONTENT, REMOVED, POSITIONS} and len(result.found) == 3
    expected = {p.id: Verdict.FAIL if p.id in found else Verdict.PASS for p in properties.ALL}
    assert verdicts(result) == expected


def test_a_bug_of_the_second_target_alone_is_found_there() -> None:
    result = campaign(fake(), fake("mask leaks", mask="additive"))
    (bug,) = result.found
    assert bug.target == fake("mask leaks", mask="additive") and bug.finding.property_id == CONTENT


def test_first_only_stops_at_the_first_finding() -> None:
    result = campaign(fake("mask leaks", "reports zero removed"), first_only=True)
    assert len(result.found) == 1
    assert result.tally.coverage.programs < SMALL.programs


@pytest.mark.parametrize("capability", list(Capability))
def test_a_missing_capability_is_not_applicable_and_says_which(capability: Capability) -> None:
    result = campaign(fake(lacks=frozenset({capability})), profile=TINY)
    for one, prop in zip(result.properties, properties.ALL, strict=True):
        if capability in prop.needs:
            assert one.verdict is Verdict.NOT_APPLICABLE and one.reason == f"the target lacks: {capability}"
        else:
            stays = (
                capability is Capability.FRONT_TRIM
                and one.reason == "nothing ever leaves the front of the target's caches"
            )
            assert stays == (one.verdict is Verdict.NOT_APPLICABLE) and "lacks" not in (one.reason or "")


@pytest.mark.parametrize(
    ("target", "vacuous", "inconclusive"),
    [
        (fake(mask="causal"), {WIDTH, CONTENT, UNTRIMMED}, set()),
        (quirky("hides a call"), {WIDTH, CONTENT, ATTENDED}, {LENGTHS, POSITIONS}),
        (quirky("hides a call after a trim"), {WIDTH}, {CONTENT, LENGTHS, POSITIONS, ATTENDED}),
        (quirky("encoder call"), {WIDTH, CONTENT, ATTENDED}, {LENGTHS, POSITIONS}),
        (quirky("hides positions after a trim"), {POSITIONS}, {WIDTH, CONTENT, LENGTHS, ATTENDED}),
        (quirky("a table instead of positions"), {POSITIONS}, set()),
        (quirky("attention by hand"), {WIDTH}, set()),
    ],
)
def test_what_is_never_decisive_is_vacuous_and_what_is_half_hidden_inconclusive(
    target: FakeTarget, vacuous: set[str], inconclusive: set[str]
) -> None:
    result = campaign(target)
    assert {one for one, verdict in verdicts(result).items() if verdict is Verdict.VACUOUS} == vacuous
    assert {one for one, verdict in verdicts(result).items() if verdict is Verdict.INCONCLUSIVE} == inconclusive
    assert result.verdict is (Verdict.INCONCLUSIVE if inconclusive else Verdict.VACUOUS) and result.found == []
    cover = result.tally.coverage
    assert (cover.blind_forwards > 0) == bool(inconclusive)
    for one in result.properties:
        decisive = properties.BY_ID[one.id].decisive_when
        if one.id in inconclusive:
            hidden = f"{cover.blind_forwards} of {cover.forwards} forwards hid attention or position calls"
            assert one.reason == hidden
        elif one.id in vacuous and one.tally.steps:
            where = "on 1 of 1 configurations (plain, rows)"
            assert one.reason == f"no decisive step {where}: decisive would be: {decisive}"
        elif one.id in vacuous:
            assert one.reason == f"it met nothing that it could judge (decisive would be: {decisive})"
        elif one.verdict is not Verdict.NOT_APPLICABLE:  # a mask that is never explicit cannot hide padding
            assert one.reason is None


def test_a_half_hidden_configuration_makes_all_inconclusive_but_a_finding_stays() -> None:
    result = campaign(fake("reports zero removed"), quirky("hides a call after a trim", variant="half"))
    assert verdicts(result)[REMOVED] is Verdict.FAIL and result.verdict is Verdict.FAIL
    assert verdicts(result)[POSITIONS] is Verdict.INCONCLUSIVE and verdicts(result)[ROWS] is Verdict.PASS


def test_programs_that_never_trim_prove_nothing_about_trims() -> None:
    lacks = frozenset({Capability.FRONT_TRIM, Capability.ENFORCE, Capability.ROLLBACK})
    result = campaign(fake(lacks=lacks))
    said = {one.id: one.reason for one in result.properties if one.verdict is Verdict.NOT_APPLICABLE}
    assert {one for one, reason in said.items() if reason == "the target can neither trim nor roll back"} == {
        LENGTHS,
        REMOVED,
        ROWS,
    }
    assert {one for one, reason in said.items() if "leaves the front" in (reason or "")} == {WIDTH, POSITIONS}
    assert NEVER in said and Verdict.VACUOUS not in verdicts(result).values()


def test_what_cannot_be_decisive_is_judged_all_the_same() -> None:
    lacks = frozenset({Capability.FRONT_TRIM, Capability.ENFORCE, Capability.ROLLBACK})
    assert verdicts(campaign(fake("reset keeps the offset", lacks=lacks)))[LENGTHS] is Verdict.FAIL


def test_noise_fails_the_control_and_makes_the_comparison_inconclusive() -> None:
    result = campaign(fake("noise"))
    assert verdicts(result)[SAME] is Verdict.FAIL
    assert verdicts(result)[UNTRIMMED] is Verdict.INCONCLUSIVE
    (bug,) = result.found
    assert bug.finding.property_id == SAME
    assert bug.reproducible and bug.finding.reproducible
    only = run_campaign("fake", [fake("noise")], [properties.BY_ID[UNTRIMMED]], SMALL, 0)
    assert only.verdict is Verdict.INCONCLUSIVE and only.found == []
