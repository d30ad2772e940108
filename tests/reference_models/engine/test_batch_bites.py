"""The programs of ``batch_programs`` find each of these bugs, planted in a batch of caches one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from kv_harness_batch_bugs import BUGS, Patch
from kv_harness_batch_programs import programs, run


@settings(
    max_examples=200,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    report_multiple_bugs=False,
)
@given(programs)
def search(program: Any) -> None:
    run(program)


@pytest.mark.parametrize("plant", BUGS, ids=lambda plant: plant.__name__)
def test_the_programs_find(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        search()


def test_the_programs_find_nothing_where_nothing_is() -> None:
    search()
