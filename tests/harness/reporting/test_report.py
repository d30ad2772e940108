"""``kv-harness report`` loses nothing: whatever is merged, in whatever order, and whatever it cannot read or write."""

from __future__ import annotations

import copy
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness import cli
from harness.commands import file_to_write
from harness.reporting import history, load_schema
from harness.reporting.issue import issue_markdown
from harness.reporting.kill_matrix import NAME, checked
from harness.reporting.shards import whole_record
from harness.reporting.text import code
from tests.harness.reporting.test_kill_matrix import WHOLE

Record = dict[str, Any]
VALIDATOR = jsonschema.Draft202012Validator(load_schema())


def shard(record: Record, number: int, of: int = 2) -> Record:
    made = copy.deepcopy(record) | {"shards": {"of": of, "numbers": [number]}}
    made["coverage"]["blind_forwards"] = 0
    return made


def put(out: Path, *shards: Record, whole: Record | None = None) -> Path:
    """A folder of reports of one family."""
    for one in shards:
        file = out / "shards" / "families" / "x" / f"{one['shards']['numbers'][0]}-of-{one['shards']['of']}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(one))
    if whole is not None:
        (out / "families").mkdir(parents=True, exist_ok=True)
        (out / "families" / "x.json").write_text(json.dumps(whole))
    return out


def merged(out: Path, *folders: Path, code: int = 0) -> Record:
    assert (
        cli.main(["report", "--out", str(out), *(word for each in folders for word in ("--merge", str(each)))]) == code
    )
    made: Record = json.loads((out / "families" / "x.json").read_text())
    VALIDATOR.validate(made)
    return made


def in_every_order(tmp_path: Path, *folders: Path) -> Record:
    """What these become, in whatever order and however often."""
    made = []
    for number, order in enumerate(itertools.permutations(folders)):
        at_once, each = tmp_path / f"once-{number}", tmp_path / f"each-{number}"
        made.append(merged(at_once, *order, *order))
        for folder in (*order, *order, order[0]):
            merged(each, folder)
        made += [merged(each, each), merged(each, at_once)]
    assert all(one == made[0] for one in made)
    return made[0]


def test_a_fail_made_elsewhere_stays_over_shards_that_pass(records: dict[str, Record], tmp_path: Path) -> None:
    passed = [shard(records["pass"], number) for number in (1, 2)]
    failed = whole_record([shard(records["pass"], 1), shard(records["fail"], 2)])
    for seed in (failed["seed"], 99):
        here = put(tmp_path / f"{seed}" / "here", *passed)
        there = put(tmp_path / f"{seed}" / "there", whole=failed | {"seed": seed})
        assert in_every_order(tmp_path / f"{seed}", here, there)["verdict"] == "FAIL"


def test_what_was_only_missing_is_replaced(records: dict[str, Record], tmp_path: Path) -> None:
    passed = [shard(records["pass"], number) for number in (1, 2)]
    half = put(tmp_path / "half", whole=whole_record(passed[:1]))
    assert in_every_order(tmp_path, half, put(tmp_path / "all", *passed))["verdict"] == "PASS"
    assert in_every_order(tmp_path / "2", half, put(tmp_path / "made", whole=whole_record(passed)))["verdict"] == "PASS"


def test_a_shard_of_another_run_destroys_nothing(
    records: dict[str, Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = put(tmp_path / "here", shard(records["pass"], 1))
    first = put(tmp_path / "first", shard(records["pass"], 2))
    other = put(tmp_path / "other", shard(records["fail"], 1) | {"seed": 99})
    before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
    assert cli.main(["report", "--out", str(here), "--merge", str(first), "--merge", str(other)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "of different runs: seed 5 and 99" in said
    assert str(here) in said and str(other) in said
    assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before


def other_finding(record: Record, seed: int, name: str) -> Record:
    made = copy.deepcopy(record) | {"seed": seed}
    made["findings"][0] |= {"property": name, "message": f"of seed {seed}"}
    for row in made["properties"]:
        if row["verdict"] == "FAIL" or row["id"] == name:
            row |= {"verdict": "FAIL" if row["id"] == name else "PASS", "reason": None}
    return made


def test_the_findings_of_two_seeds_are_both_kept(records: dict[str, Record], tmp_path: Path) -> None:
    first = records["fail"]["findings"][0]["property"]
    second = next(row["id"] for row in records["fail"]["properties"] if row["id"] != first)
    made = [other_finding(records["fail"], 1, first), other_finding(records["fail"], 2, second)]
    made.append(other_finding(records["fail"], 3, first))
    folders = [put(tmp_path / f"seed-{number}", whole=record) for number, record in enumerate(made)]
    whole = in_every_order(tmp_path, *folders)
    text = issue_markdown([whole])
    assert all(f"of seed {seed}" in text for seed in (1, 2, 3))
    failing = {row["id"] for row in whole["properties"] if row["verdict"] == "FAIL"}
    assert failing == {first, second} and second in whole["verdict_reason"]


EDITS: dict[str, Callable[[Record], object]] = {
    "numbers null": lambda one: one["shards"].update(numbers=[None]),
    "numbers {}": lambda one: one["shards"].update(numbers=[{}]),
    "of": lambda one: one["shards"].update(of="2"),
    "coverage null": lambda one: one["coverage"].update(forwards=None),
    "coverage x": lambda one: one["coverage"].update(forwards="x"),
    "verdict": lambda one: one.update(verdict="x"),
    "property verdict": lambda one: one["properties"][0].update(verdict="x"),
    "limits": lambda one: one.update(limits=[[]]),
    "infinity": lambda one: one.update(seconds=float("inf")),
    "surrogate": lambda one: one.update(device="\ud800"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_shard_is_named(
    edit: str, records: dict[str, Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = shard(records["fail"], 2)
    EDITS[edit](bad)
    put(tmp_path, shard(records["pass"], 1), bad)
    assert cli.main(["report", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "-of-2.json: no record of a report" in said


MATRIX_EDITS: dict[str, Callable[[Record], object]] = {
    "versions": lambda one: one.pop("versions"),
    "seeds": lambda one: one.update(seeds=["x"]),
    "run": lambda one: one["hunts"][0].update(run=5),
    "seed": lambda one: one["hunts"][0].update(seed=None),
    "seconds": lambda one: one["hunts"][0].update(seconds=float("inf")),
    "after": lambda one: one["hunts"][0].update(after="x"),
}


@pytest.mark.parametrize("edit", MATRIX_EDITS)
def test_an_edited_matrix_is_named(edit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(WHOLE) == WHOLE
    bad = copy.deepcopy(WHOLE)
    MATRIX_EDITS[edit](bad)
    file = tmp_path / "faults" / f"{NAME}.json"
    file.parent.mkdir()
    file.write_text(json.dumps(bad))
    assert cli.main(["report", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{NAME}.json: no kill matrix" in said


@pytest.mark.parametrize("option", ["report --issue", "explain x.json --html"])
@pytest.mark.parametrize("name", ["/dev/full", "{}/none/x.md", "", "{}", "a\0b", "x" * 300, "{}/.."])
def test_a_file_that_cannot_be_is_refused_first(
    option: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, name = option.split(), name.format(tmp_path)
    assert cli.main([*command, name]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"argument {command[-1]}: " in said and ".tmp" not in said
    assert not Path("/dev/full").is_file() and list(tmp_path.iterdir()) == []


def test_a_file_that_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old").touch()
    for name in ("new.md", "old", str(tmp_path / "new")):
        assert file_to_write(name) == Path(name)


def test_an_issue_has_nothing_live(records: dict[str, Record]) -> None:
    live = "@someone #123 [a](b) ![i](u) ` <b>"
    bad = copy.deepcopy(records["fail"]) | dict.fromkeys(("target", "verdict_reason", "device", "command"), live)
    bad["findings"][0] |= dict.fromkeys(("property", "target", "message", "program", "replay"), live)
    text = issue_markdown([bad], [live])
    prose = text.replace(code(live), "").replace(f"kv-harness {bad['versions']['kv-harness']}", "")
    fenced = prose.split("```")
    assert live not in "".join(fenced[::2]) and text.count(code(live)) == 6 and code(live) == f"``{live}``"
    assert code("`a`") == "`` `a` ``" and code("a\nb") == "`a b`"


def test_a_target_without_a_report_is_told(records: dict[str, Record], tmp_path: Path) -> None:
    put(tmp_path, whole=records["pass"])
    lost = history.entry(records["pass"], "2026-01-01") | {"target": "reference:lost"}
    history.append(tmp_path / history.FILE, [lost])
    assert cli.main(["report", "--out", str(tmp_path), "--issue", str(tmp_path / "issue.md")]) == 0
    (line,) = [line for line in (tmp_path / "index.md").read_text().splitlines() if "reference:lost" in line]
    assert "| no report |" in line.replace("  ", " ")
    text = (tmp_path / "issue.md").read_text()
    assert "No report, though history knows them: `reference:lost`." in text and "0 reports of 1 are not PASS." in text


def test_the_index_links_to_its_reports_and_to_nothing_else(records: dict[str, Record], tmp_path: Path) -> None:
    folder = put(tmp_path, whole=records["pass"] | {"target": "reference:[x](http://y) qwen2_vl"})
    odd = next((folder / "families").glob("*.json"))
    odd.rename(odd.with_name("odd (1).json"))
    assert cli.main(["report", "--out", str(folder)]) == 0
    assert "| [families/odd%20%281%29.md](families/odd%20%281%29.md) |" in (folder / "index.md").read_text()
    page = (folder / "index.html").read_text()
    assert '<a href="families/odd%20%281%29.html">families/odd%20%281%29</a>' in page and page.count("<a ") == 1
    assert (folder / "families" / "odd (1).html").is_file()


@pytest.mark.parametrize(
    "place", ["targets/a.json", "checkpoints/a.json", "history.jsonl", "faults/kill-matrix.json", "families/a.partial"]
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / place).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / place)
    code, said = cli.main(["report", "--out", str(tmp_path)]), capsys.readouterr()
    if place.endswith(".partial"):  # that it is there says enough
        assert code == 0 and "families/a" in said.out
    else:
        assert code == 2 and said.err.count("\n") == 1 and "is not a regular file" in said.err


def test_a_file_in_the_place_of_a_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "targets").write_text("x")
    assert cli.main(["report", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "targets: is not a folder" in said and not (tmp_path / "index.md").exists()


def test_a_name_that_is_not_utf_8_is_named(
    records: dict[str, Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "families" / os.fsdecode(b"\xff.json")
    path.parent.mkdir()
    try:
        path.write_text(json.dumps(records["pass"]))
    except OSError:
        pytest.skip("this file system has no such names")
    assert cli.main(["report", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rename the file" in said and not (tmp_path / "index.md").exists()
