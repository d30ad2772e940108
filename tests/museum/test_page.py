"""What ``kv-harness museum`` prints and writes, and how it goes through the releases; campaigns are faked."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.commands import museum as command
from harness.commands.museum import Visit
from harness.museum import Exhibit
from tests.museum.test_manifest import BUG, HIT, OTHER, SHOWN, visit


def _faked(monkeypatch: pytest.MonkeyPatch, *seen: Visit) -> None:
    def visits(chosen: Any, venvs: Path, profile: str, seed: int, limit: float, jobs: int) -> Iterator[Visit]:
        assert (list(chosen), profile, seed, jobs) == ([BUG], "quick", 0, 1)
        yield from seen

    monkeypatch.setattr(command, "exhibits", lambda: (BUG,))
    monkeypatch.setattr(command, "visits", visits)


def test_a_table_and_a_summary_are_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _faked(monkeypatch, visit("1.1", OTHER), visit("1.0", OTHER, HIT))  # as they were done
    assert main(["museum", "--out", str(tmp_path)]) == 0
    lines, also = capsys.readouterr().out.splitlines(), OTHER.property
    program = "2 operations: `Prefill(1) ; Decode(1)`"
    assert lines[2:] == [
        f"| a-bug | mlx-lm 1.1 | llama | clean |  | 104 programs | 9 |  | {also} |",
        f"| a-bug | mlx-lm 1.0 | llama | found | {HIT.property} | 7 programs | 2 | {program} | {also} |",
        "",
        "1 of 1 old releases: the bug was found; 1 of 1 mended ones: clean",
    ]
    record = json.loads((tmp_path / "museum.json").read_text())
    old, mended = record["visits"]  # as the manifest has them
    assert (old["verdict"], old["found"][1]["after"], mended["programs"]) == ("found", 7, 104)
    assert (old["hit"]["property"], mended["hit"], record["partial"]) == (HIT.property, None, False)
    page = (tmp_path / "museum.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| a-")]
    assert rows == [
        ["a-bug", "mlx-lm 1.0", "llama", "found", HIT.property, "7 programs", "1.5", program, "104 programs, 9 s"],
        ["a-bug", "mlx-lm 1.1", "llama", "clean", "", "", "", "", "104 programs, 9 s"],
    ]
    assert "[ml-explore/mlx-lm#1](https://github.com/ml-explore/mlx-lm/issues/1)" in page
    beside = f"llama: {OTHER.property} (`{OTHER.program}`)"
    mended_page, old_page = page.split("## Found in mended releases")[1].split("## Found beside the bug in old")
    assert f"- mlx-lm 1.1, {beside}: {BUG.others[0].why}" in mended_page and f"- mlx-lm 1.0, {beside}\n" in old_page
    assert (mended["found"][0]["why"], "why" in old["found"][0]) == (BUG.others[0].why, False)


def test_an_interrupted_museum_keeps_what_it_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def visits(*_: Any) -> Iterator[Visit]:
        yield visit("1.0", HIT)
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "exhibits", lambda: (BUG,))
    monkeypatch.setattr(command, "visits", visits)
    assert main(["museum", "--out", str(tmp_path)]) == 1
    record = json.loads((tmp_path / "museum.json").read_text())
    assert record["partial"] and len(record["visits"]) == 1
    assert "**Interrupted:**" in (tmp_path / "museum.md").read_text()


def _as_named(exhibit: Exhibit, version: str, family: str, python: Path, *asked: Any) -> Visit:
    assert python == Path("python") and asked == ("quick", 3, 60.0)
    return Visit(exhibit, version, family, 104, 9.0, (), SHOWN)


@pytest.mark.parametrize("jobs", [1, 2])
def test_every_release_is_visited_with_every_family(jobs: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[str] = []

    def environment(folder: Path, _: Any) -> Path:
        made.append(folder.name)
        return Path("python")

    monkeypatch.setattr(command, "environment", environment)
    monkeypatch.setattr(command, "_visit", _as_named)
    two = dataclasses.replace(BUG, families=("llama", "qwen3"))
    seen = list(command.visits([two], tmp_path, "quick", 3, 60.0, jobs))
    expected = {(version, family) for version in ("1.0", "1.1") for family in two.families}
    assert {(one.version, one.family) for one in seen} == expected and len(seen) == len(expected)
    assert set(made) == {"mlx-lm-1.0", "mlx-lm-1.1"}


@pytest.mark.parametrize("seen", [visit("1.0"), visit("1.1", HIT)])
def test_what_is_not_as_it_should_be_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: Visit
) -> None:
    _faked(monkeypatch, seen)
    assert main(["museum"]) == 1
    assert "0 of 1" in capsys.readouterr().out.splitlines()[-1]


def test_what_another_bug_hides_is_looked_for_with_other_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def once(exhibit: Exhibit, version: str, family: str, python: Path, profile: str, seed: int, limit: float) -> Visit:
        asked.append(seed)
        return Visit(exhibit, version, family, 104, 9.0, (), SHOWN if len(asked) == hidden + 1 else frozenset())

    monkeypatch.setattr(command, "_visit_once", once)
    exhibit = BUG
    for hidden, verdict in ((0, "clean"), (1, "clean"), (3, "NOT SHOWN")):
        asked.clear()
        visit = command._visit(exhibit, exhibit.fixed, "llama", Path("python"), "quick", 7, 1.0)
        assert visit.verdict == verdict and asked[0] == 7
        assert len(asked) == len(set(asked)) == min(hidden + 1, 3)
