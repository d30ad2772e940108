"""Campaigns that are disturbed: bugs that come and go, interrupts, errors of the harness's own use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget
from kv_harness_on_fakes import (
    CONTENT,
    SMALL,
    campaign,
    fake,
    verdicts,
)

import properties
from harness.findings import Verdict
from harness.judge import judge_program
from harness.profiles import Profile


@pytest.mark.parametrize("shrink", [False, True])
def test_a_bug_that_comes_and_goes_is_reported_and_does_not_crash_the_campaign(shrink: bool) -> None:
    calls = iter(range(10**9))

    class Shaky(FakeTarget):
        def open(self, owners: Any) -> Any:
            session = super().open(owners)
            forward = session.forward

            def once(sequence: int, tokens: Any, prompt: Any = None) -> Any:
                seen = forward(sequence, tokens, prompt)
                if next(calls) == 15:
                    return dataclasses.replace(seen, logits=None, error="RuntimeError: once in a lifetime")
                return seen

            session.forward = once  # type: ignore[method-assign]
            return session

    result = campaign(Shaky(), profile=Profile("p", programs=20, operations=6, shrink=shrink))
    (bug,) = result.found
    assert not bug.reproducible and not bug.finding.reproducible and result.verdict is Verdict.FAIL
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


def test_a_finding_seen_in_a_search_is_told_as_reproducible_only_if_a_target_made_new_shows_it() -> None:
    class Remembering(FakeTarget):
        def open(self, owners: Any) -> Any:
            return (fake() if self.renewed else fake("mask leaks")).open(owners)

    target = Remembering()
    result = campaign(target)
    (bug,) = result.found
    assert (bug.reproducible, bug.finding.reproducible, len(target.renewed)) == (False, False, 1)
    assert bug.finding.property_id == CONTENT and result.verdict is Verdict.FAIL
