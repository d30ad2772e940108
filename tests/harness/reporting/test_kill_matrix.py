"""Kill matrices of several invocations, put together."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.reporting.kill_matrix import matrix_markdown, matrix_record, merged, write_matrix


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


def test_report_puts_matrices_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, record in (("one", WHOLE), ("two", CUT), ("three", REST)):
        write_matrix(tmp_path / name / "faults", record)
    folders = [str(tmp_path / name) for name in ("two", "three", "two")]
    for _ in range(2):
        arguments = [argument for folder in folders for argument in ("--merge", folder)]
        assert cli.main(["report", *arguments, "--out", str(tmp_path / "one")]) == 0
    record = json.loads((tmp_path / "one" / "faults" / "kill-matrix.json").read_text())
    assert record == json.loads(json.dumps(merged([WHOLE, CUT, REST])))
    assert "4 of 6 hunts found their bug" in capsys.readouterr().out
    assert "<svg" in (tmp_path / "one" / "faults" / "kill-matrix.html").read_text()


@pytest.mark.parametrize("text", ["{}", "[]", "x", '{"hunts": 1}', json.dumps(WHOLE | {"hunts": [1]})])
def test_what_is_no_matrix_is_named(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "faults" / "kill-matrix.json"
    file.parent.mkdir()
    file.write_text(text)
    assert cli.main(["report", "--out", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "kill-matrix.json: no kill matrix" in err and file.read_text() == text


def test_matrices_of_two_devices_are_not_put_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_matrix(tmp_path / "one" / "faults", WHOLE)
    write_matrix(tmp_path / "two" / "faults", matrix(hunt("a", 1), device="gpu"))
    assert cli.main(["report", "--merge", str(tmp_path / "two"), "--out", str(tmp_path / "one")]) == 2
    assert "kill matrices with another device: cpu and gpu" in capsys.readouterr().err
