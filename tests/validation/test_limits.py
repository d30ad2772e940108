"""What a validation did not get to, by results made up for it."""

from __future__ import annotations

import pytest

from harness.validation.limits import unfinished
from harness.validation.plan import Asked, make_plan

PLAN = make_plan(Asked(16, 8, 40, 2), images=False)
WHOLE = {planned.name: {"forwards": planned.forwards, "stopped": None} for planned in PLAN.programs}


def _stopped(operation: int, text: str, forwards: int) -> dict[str, object]:
    return {"forwards": forwards, "stopped": {"operation": operation, "text": text, "why": "ValueError: no."}}


def test_whole_programs_leave_nothing_to_say() -> None:
    assert [planned.forwards for planned in PLAN.programs] == [7, 8, 7]
    control = {name: result for name, result in WHOLE.items() if name != "untrimmed"}  # which is not run on it, by plan
    assert not list(unfinished(PLAN, {"after": WHOLE, "before": WHOLE, "control": control, "reader": {}}))


@pytest.mark.parametrize("side", ["after", "before", "control", "reader"])
def test_every_side_says_where_a_program_stopped_and_why(side: str) -> None:
    cut = WHOLE | {"bounded": _stopped(7, "Chunk(8)", 4)}
    (said,) = unfinished(PLAN, {"after": WHOLE, side: cut})
    where = "in forward 4 of 8 (operation 7 of 17, Chunk(8)): ValueError: no. What follows was not run there."
    assert said == f"bounded stopped on the {side} side {where}"


def test_a_trim_that_failed_is_no_forward() -> None:
    (said,) = unfinished(PLAN, {"after": WHOLE | {"bounded": _stopped(2, "EnforceMaxKvSize(16)", 1)}})
    assert "stopped on the after side behind forward 1 of 8 (operation 2 of 17, " in said


def test_what_the_before_side_never_ran_is_named() -> None:
    said = list(unfinished(PLAN, {"after": WHOLE, "before": {"untrimmed": WHOLE["untrimmed"]}}))
    assert [sentence.split(" was not run on the before side")[0] for sentence in said] == [
        "bounded",
        "sinks_and_rollback",
    ]
