"""The judge: who may judge, what is hidden from it, and where a program ends."""

from __future__ import annotations

import pytest
from kv_harness_on_fakes import (
    CONTENT,
    POSITIONS,
    REMOVED,
    RICH,
    UNTOUCHED,
    UNTRIMMED,
    fake,
    judge,
    quirky,
)

import properties
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import Judge
from harness.operations import Prefill
from harness.tally import Tally


def test_a_missing_capability_keeps_a_property_from_judging() -> None:
    for prop in properties.ALL:
        for capability in prop.needs:
            outcome = judge(fake(lacks=frozenset({capability})), RICH, prop.id)
            assert outcome.looked(prop.id) == 0 and outcome.finding is None


def test_a_target_that_does_not_repeat_itself_makes_the_ab_comparison_inconclusive() -> None:
    outcome = judge(fake("noise", "bias under the live policy"), UNTOUCHED, UNTRIMMED)
    assert outcome.finding is None
    tally = outcome.tally.properties[UNTRIMMED]
    assert (tally.inconclusive, tally.decisive_steps) == (1, 0)


def test_blind_forwards_are_counted() -> None:
    forwards = judge(fake(), RICH).tally.coverage.forwards
    assert forwards == 10
    assert judge(fake(), RICH).tally.coverage.blind_forwards == 0
    assert judge(quirky("hides a call"), RICH).tally.coverage.blind_forwards == forwards
    assert judge(quirky("encoder call"), RICH).tally.coverage.blind_forwards == forwards
    after = sum(len(step.forwards) for step in execute(fake(), RICH).steps if step.before.trimmed)
    assert 0 < after < forwards
    for quirk in ("hides a call after a trim", "hides positions after a trim"):
        assert judge(quirky(quirk), RICH).tally.coverage.blind_forwards == after
    assert judge(fake(fails_at=1), RICH).tally.coverage.blind_forwards == 0  # it raised: that says enough
    assert judge(quirky("a table instead of positions"), RICH).tally.coverage.blind_forwards == 0


def test_a_muted_property_is_counted_and_does_not_stop_the_program() -> None:
    tally = Tally()
    target = fake("reports zero removed", "positions from live_len")
    muted = Judge(target, RICH.owners, properties.ALL, tally, {REMOVED, POSITIONS})
    for operation in RICH.operations:
        muted.apply(operation)
    muted.end()
    muted.end()  # twice does nothing
    assert tally.coverage.programs == 1 and len(muted.run.steps) == len(RICH.operations)
    assert tally.properties[REMOVED].violations >= 2 and tally.properties[POSITIONS].violations >= 2


def test_after_a_finding_the_program_has_ended() -> None:
    tally = Tally()
    subject = Judge(fake("mask leaks"), ("pool",), properties.ALL, tally)
    with pytest.raises(FindingError) as caught:
        subject.apply(Prefill(4))
    assert subject.stopped and tally.coverage.programs == 1
    subject.end()
    assert tally.coverage.programs == 1 and tally.properties[CONTENT].violations == 1
    text = caught.value.finding.text("kv-harness replay x.json").splitlines()
    assert text[0] == f"FAIL  {CONTENT}   fake/fake@live-mask"
    assert text[2:] == ["      program   Prefill(4)", "      replay    kv-harness replay x.json"]
