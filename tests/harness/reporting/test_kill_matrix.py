"""Kill matrices of several invocations, put together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from harness.reporting.kill_matrix import matrix_markdown, matrix_record, merged


def hunt(fault: str, seed: int, run: str = "x", by: str | None = "p", **changes: Any) -> dict[str, Any]:
    made = {"fault": fault, "run": run, "seed": seed, "by": by, "after": 2, "seconds": 0.5, "operations": None}
    return made | {"program": None, "message": None, "programs": 9, "named": by is not None} | changes


def matrix(*hunts: dict[str, Any], faults: str = "ab", partial: bool = False, **changes: Any) -> dict[str, Any]:
    seeds = sorted({one["seed"] for one in hunts})
    about = {name: {"summary": "s", "layer": "l", "breaks": "p", "source": None} for name in faults}
    given: dict[str, Any] = {
        "faults": about,
        "profile": "ci",
        "seeds": seeds,
        "versions": {"mlx": "1"},
        "device": "cpu",
        "command": f"kv-harness faults --seed {seeds[0]}",
        "partial": partial,
    }
    return matrix_record(hunts, **(given | changes))


WHOLE = matrix(hunt("a", 0), hunt("b", 0), hunt("b", 0, "y"))
CUT = matrix(hunt("a", 1), hunt("b", 1), partial=True)
REST = matrix(hunt("b", 1, "y", by=None), hunt("b", 1, by=None, after=None))


def test_seeds_are_put_together_in_any_order_and_however_often() -> None:
    results = []
    for order in itertools.permutations((WHOLE, CUT, REST)):
        made = merged([merged(order[:2]), order[2], order[0]])
        assert merged([made, made]) == made == merged(order)
        results.append(made)
    assert all(one == results[0] for one in results)
    (made, *_) = results
    assert made["seeds"] == [0, 1] and made["partial"] is False
    assert [(one["fault"], one["run"], one["seed"]) for one in made["hunts"]] == [
        ("a", "x", 0), ("a", "x", 1), ("b", "x", 0), ("b", "y", 0), ("b", "x", 1), ("b", "y", 1)
    ]  # fmt: skip
    assert made["summary"]["text"].startswith("4 of 6 hunts found their bug (planted: 2)")  # the worse one stays
    assert made["command"].split("\n") == ["kv-harness faults --seed 0", "kv-harness faults --seed 1"]
    assert "- b in x, seed 1: not found in 9 programs" in matrix_markdown(made)


def test_what_is_missing_is_said() -> None:
    assert merged([WHOLE, CUT])["partial"] is True  # the second seed lacks a run
    assert merged([WHOLE, matrix(hunt("c", 0), faults="c")])["partial"] is False
    assert merged([matrix(hunt("a", 0), partial=True)])["partial"] is True  # nobody hunted the other bug


@pytest.mark.parametrize("changes", [{"profile": "quick"}, {"device": "gpu"}, {"versions": {"mlx": "2"}}], ids=str)
def test_matrices_that_do_not_compare_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"kill matrices with another {next(iter(changes)).rstrip('s')}: .*"):
        merged([WHOLE, matrix(hunt("a", 1), **changes)])
