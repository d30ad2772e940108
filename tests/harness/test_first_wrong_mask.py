"""Which mask a validation keeps of a program: the first that is wrong in its width or in what it shows."""

from __future__ import annotations

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness.cells import Cells
from harness.validation.judged import OF_MASKS
from harness.validation.measuring import measure
from harness.validation.plan import Asked, make_plan

PLAN = make_plan(Asked(16, 8, 40, 2), images=False)
JUDGES = tuple(properties.BY_ID[name] for name in (*OF_MASKS, "every_operation_completes"))


def test_a_mask_that_is_too_wide_is_kept_where_it_first_is() -> None:
    mask = measure(FakeTarget(policy="offset"), PLAN.programs[1], JUDGES, lambda *_: "", lambda _: None)["mask"]
    assert (mask["operation"], mask["mask_shape"]) == ("Chunk(8)", [8, 32])
    assert Cells.from_json(mask["cells"]).beyond == 8 * 8


@pytest.mark.parametrize("bug", ["mask leaks", "mask hides itself"])
def test_a_mask_that_fits_and_is_wrong_has_one_too(bug: str) -> None:
    target = FakeTarget(bugs=frozenset({bug}))  # type: ignore[arg-type]
    mask = measure(target, PLAN.programs[1], JUDGES, lambda *_: "", lambda _: None)["mask"]
    cells = Cells.from_json(mask["cells"])
    assert cells.wrong and not cells.beyond and cells.keys == mask["mask_shape"][-1]


def test_a_right_mask_has_none() -> None:
    for planned in PLAN.programs:
        assert measure(FakeTarget(), planned, JUDGES, lambda *_: "", lambda _: None)["mask"] is None
