"""Pictures of the kill matrix, and of properties over many runs; and where a page has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from harness import cli
from harness.reporting.grids import MOST_RUNS, kill_matrix, over_time
from harness.reporting.history import append, by_target, properties_over_time


def cells(picture: str) -> dict[str, int]:
    """How many squares each class has."""
    found = {}
    for each in ElementTree.fromstring(picture).iter():
        if each.tag.endswith("path"):
            found[str(each.get("class"))] = str(each.get("d")).count("M")
    return found


def hunt(fault: str, run: str, seed: int = 0, by: str | None = "p", named: bool = True) -> dict[str, Any]:
    return {"fault": fault, "run": run, "seed": seed, "by": by, "named": named}


def test_a_cell_of_the_kill_matrix_is_its_worst_seed() -> None:
    hunts = [
        hunt("a", "one"),
        hunt("a", "two", by="other", named=False),
        hunt("a", "two", seed=1),
        hunt("b", "one", by=None, named=False),
        hunt("b", "one", seed=1),
    ]
    picture = kill_matrix({"hunts": hunts, "faults": {"a": {}, "b": {}, "never hunted": {}}})
    assert picture is not None and cells(picture) == {"shown": 1, "lack": 1, "bad": 1}
    assert "2 planted bugs in 2 runs: 3 cells, 1 found by the property that they name, 1 by another" in picture
    assert "never hunted" not in picture
    assert kill_matrix({"hunts": [], "faults": {}}) is None


def run(day: int, policy: str = "live", **verdicts: str) -> dict[str, Any]:
    return {
        "at": f"2026-01-{day:02}T00:00",
        "target": "reference:a<b>",
        "policy": policy,
        "profile": "quick",
        "seed": 0,
        "verdict": "PASS",
        "partial": False,
        "programs": 1,
        "seconds": 1.0,
        "decisive_steps": 1,
        "broken": [],
        "verdicts": verdicts,
        "versions": {},
    }


def test_properties_over_time() -> None:
    history = [
        run(1, p="PASS", q="PASS"),
        run(2, p="FAIL", q="PASS", new="VACUOUS"),
        run(3, p="PASS", q="NOT APPLICABLE", new="PASS"),
        run(3),  # written by a version that did not say
        run(4, "offset", p="FAIL"),
    ]
    told = by_target(history)
    assert {name: len(runs) for name, runs in told.items()} == {"reference:a<b>": 3, "reference:a<b> (offset mask)": 1}
    picture = over_time("reference:a<b>", told["reference:a<b>"])
    assert picture is not None and cells(picture) == {"shown": 5, "bad": 1, "lack": 1, "none": 1}
    assert "3 properties in 3 runs; 1 cell" in picture.replace("cells", "cell")
    assert over_time("x", [run(3)]) is None
    rows = [line.split("|")[1:-1] for line in properties_over_time(history).splitlines() if line.startswith("|")][2:]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["reference:a\\<b>", "new", ".VP"],
        ["reference:a\\<b>", "p", "PFP"],
        ["reference:a\\<b> (offset mask)", "p", "F"],
    ]
    assert "passed in every run" in properties_over_time([run(1, p="PASS", q="NOT APPLICABLE")])


def test_only_the_newest_runs_are_drawn() -> None:
    picture = over_time("x", [run(1, p="FAIL"), *(run(2, p="PASS") for _ in range(MOST_RUNS))])
    assert picture is not None and cells(picture) == {"shown": MOST_RUNS}


def test_the_index_has_a_picture_of_every_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append(tmp_path / "history.jsonl", [run(1, p="PASS"), run(2, p="FAIL"), run(2, "offset", p="FAIL")])
    assert cli.main(["report", "--out", str(tmp_path)]) == 0
    page, text = ((tmp_path / f"index.{kind}").read_text() for kind in ("html", "md"))
    assert page.count("<svg") == 2 and page.index("Properties over time") < page.index("<svg")
    assert "| PF" in text and "PF" in capsys.readouterr().out


@pytest.mark.parametrize("verdicts", [["p"], {"p": 1}, None])
def test_verdicts_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], verdicts: Any) -> None:
    (tmp_path / "history.jsonl").write_text(json.dumps(run(1) | {"verdicts": verdicts}) + "\n")
    assert cli.main(["report", "--out", str(tmp_path)]) == 2
    assert "line 1 is no entry" in capsys.readouterr().err


def test_faults_writes_its_picture(tmp_path: Path) -> None:
    arguments = ["faults", "--only", "mask-one-key-narrow", "--families", "nemotron_nas", "--profile", "smoke"]
    assert cli.main([*arguments, "--out", str(tmp_path)]) in (0, 1)
    page = (tmp_path / "faults" / "kill-matrix.html").read_text()
    assert page.count("<svg") == 1 and page.index("<h2>Found") < page.index("<svg") < page.index("<h2>The bugs")
