"""Campaigns on fake targets: verdicts, several bugs at once, interruption."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness.campaign import CampaignResult, run_campaign
from harness.findings import Verdict
from harness.judge import judge_program
from harness.profiles import Profile
from harness.target import Capability

WIDTH = "mask_key_axis_equals_live_keys"
CONTENT = "mask_shows_exactly_the_visible_set"
POSITIONS = "positions_are_absolute"
REMOVED = "trim_reports_what_it_removed"
SAME = "same_program_same_bytes"
UNTRIMMED = "untrimmed_outputs_are_byte_identical"

SMALL = Profile("small", programs=20, operations=6, shrink=False)
TINY = Profile("tiny", programs=4, operations=3, shrink=False)


def fake(*bugs: Any, **named: Any) -> FakeTarget:
    return FakeTarget(bugs=frozenset(bugs), **named)


def campaign(*targets: FakeTarget, profile: Profile = SMALL, seed: int = 0, **named: Any) -> CampaignResult:
    return run_campaign("fake", targets, properties.ALL, profile, seed, **named)


def verdicts(result: CampaignResult) -> dict[str, Verdict]:
    return {one.id: one.verdict for one in result.properties}


def test_a_right_target_passes_everything() -> None:
    result = campaign(fake(), profile=Profile("p", programs=40, operations=8, shrink=False))
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
    assert result.tally.coverage.programs >= programs
    assert told == list(range(1, result.tally.coverage.programs + 1))


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
            assert one.verdict in (Verdict.PASS, Verdict.VACUOUS) and "lacks" not in (one.reason or "")


@pytest.mark.parametrize(
    ("target", "vacuous"),
    [
        (fake(mask="causal"), {WIDTH, CONTENT, UNTRIMMED}),
        (FakeTarget(quirks=frozenset({"hides a call"})), {WIDTH, CONTENT}),
        (FakeTarget(quirks=frozenset({"hides a call after a trim"})), {WIDTH}),
        (FakeTarget(quirks=frozenset({"encoder call"})), {WIDTH, CONTENT}),
    ],
)
def test_what_is_never_decisive_is_vacuous(target: FakeTarget, vacuous: set[str]) -> None:
    result = campaign(target)
    assert {one for one, verdict in verdicts(result).items() if verdict is Verdict.VACUOUS} == vacuous
    assert result.verdict is Verdict.VACUOUS and result.found == []
    for one in result.properties:
        if one.id in vacuous:
            assert one.reason is not None and properties.BY_ID[one.id].decisive_when in one.reason


def test_programs_that_never_trim_prove_nothing_about_trims(monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import machine

    for name in ("trim_and_go_on", "trim_front", "enforce", "rollback"):
        monkeypatch.setattr(machine.ProgramMachine, name, None)
    result = campaign(fake())
    assert {one for one, verdict in verdicts(result).items() if verdict is Verdict.VACUOUS} == {
        WIDTH,
        "keys_equal_ledger_live_length",
        POSITIONS,
        REMOVED,
    }


def test_noise_fails_the_control_and_makes_the_comparison_inconclusive() -> None:
    result = campaign(fake("noise"))
    assert verdicts(result)[SAME] is Verdict.FAIL
    assert verdicts(result)[UNTRIMMED] is Verdict.INCONCLUSIVE
    (bug,) = result.found
    assert bug.finding.property_id == SAME
    only = run_campaign("fake", [fake("noise")], [properties.BY_ID[UNTRIMMED]], SMALL, 0)
    assert only.verdict is Verdict.INCONCLUSIVE and only.found == []


@pytest.mark.parametrize("shrink", [False, True])
def test_a_bug_that_comes_and_goes_is_reported_and_does_not_crash_the_campaign(shrink: bool) -> None:
    calls = iter(range(10**9))

    class Shaky(FakeTarget):
        def open(self, owners: Any) -> Any:
            session = super().open(owners)
            forward = session.forward

            def once(sequence: int, tokens: Any) -> Any:
                seen = forward(sequence, tokens)
                if next(calls) == 15:
                    return dataclasses.replace(seen, logits=None, error="RuntimeError: once in a lifetime")
                return seen

            session.forward = once  # type: ignore[method-assign]
            return session

    result = campaign(Shaky(), profile=Profile("p", programs=20, operations=6, shrink=shrink))
    (bug,) = result.found
    assert not bug.reproducible and result.verdict is Verdict.FAIL
    assert "once in a lifetime" in bug.finding.message


def interrupting(at: int) -> Callable[[], None]:
    calls = iter(range(10**9))

    def hook() -> None:
        if next(calls) >= at:
            raise KeyboardInterrupt

    return hook


@pytest.mark.parametrize("at", [0, 1, 50])
def test_an_interrupt_in_a_forward_keeps_what_was_measured(at: int) -> None:
    result = campaign(fake(hook=interrupting(at)))
    assert result.partial and result.found == []
    assert result.tally.coverage.programs < SMALL.programs
    if at == 0:
        assert set(verdicts(result).values()) == {Verdict.VACUOUS} and result.verdict is Verdict.VACUOUS
    if at == 50:
        assert result.tally.coverage.programs > 1 and verdicts(result)["every_operation_completes"] is Verdict.PASS


def test_an_interrupt_from_the_progress_callback() -> None:
    def progress(done: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    result = campaign(fake(), fake(), progress=progress)
    assert result.partial and result.tally.coverage.programs == 5


def test_an_interrupt_keeps_a_finding_already_seen() -> None:
    clean = campaign(fake("mask leaks", "reports zero removed"))
    first = clean.found[0]
    for delay in (0, 1, 3):  # while the first finding is shrunk, or reduced, or the next is searched
        countdown = iter(range(10**9))

        def progress(done: int, delay: int = delay, countdown: Any = countdown) -> None:
            if done >= first.after and next(countdown) >= delay:
                raise KeyboardInterrupt

        result = campaign(fake("mask leaks", "reports zero removed"), progress=progress)
        assert result.partial and result.verdict is Verdict.FAIL
        assert [bug.finding.property_id for bug in result.found][:1] == [first.finding.property_id]
        program = result.found[0].finding.program
        with pytest.raises(AssertionError, match=first.finding.property_id):
            judge_program(fake("mask leaks", "reports zero removed"), program, properties.ALL)


def test_another_error_of_a_target_is_not_swallowed() -> None:
    def hook() -> None:
        raise LookupError("a misuse of the session")

    with pytest.raises(LookupError, match="misuse"):
        campaign(fake(hook=hook))
