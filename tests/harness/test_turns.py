"""Which programs a property that runs them again gets to judge."""

import pytest
from kv_harness_on_fakes import SAME, SMALL, UNTOUCHED, campaign, fake

from harness.operations import Decode, Prefill, Program
from harness.turns import Turns


def programs(count: int) -> list[Program]:
    return [Program((Prefill(1), Decode(number + 1))) for number in range(count)]


def test_it_judges_until_something_was_decisive_and_then_every_third() -> None:
    turns = Turns(3)
    seen = []
    for number, program in enumerate(programs(9)):
        seen.append(turns.has("a", program))
        if seen[-1]:
            turns.took("a", decisive=number >= 2)
    assert seen == [True, True, True, False, False, True, False, False, True]


def test_the_same_program_is_judged_or_not_as_before() -> None:
    turns, (first, second, *_) = Turns(4), programs(4)
    assert turns.has("a", first)
    turns.took("a", 1)
    assert [turns.has("a", each) for each in (second, first, second, first)] == [False, True, False, True]
    assert turns.has("b", second)  # every property has turns of its own


def test_all_are_judged_where_nothing_else_was_asked_for() -> None:
    turns = Turns()
    assert all(turns.has("a", program) for program in programs(5))
    turns.took("a", 1)
    assert turns.has("a", UNTOUCHED)
    with pytest.raises(ValueError, match="every 0th"):
        Turns(0)


def test_a_campaign_repeats_some_of_its_programs_and_finds_noise_all_the_same() -> None:
    result = campaign(fake())
    repeated = result.tally.properties[SAME]
    assert repeated.decisive_steps and repeated.examples < result.tally.coverage.programs
    assert SAME in {bug.finding.property_id for bug in campaign(fake("noise")).found}
    assert SMALL.every > 1
