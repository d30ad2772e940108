"""History, and ``kv-harness report``: pages from records alone, merged in any order."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from harness import cli
from harness.reporting import history
from harness.reporting.history import HistoryError, append, index_markdown, merge, read


def entry(at: str, target: str = "reference:a", verdict: str = "PASS", **changes: Any) -> history.Entry:
    made: history.Entry = {
        "at": at,
        "target": target,
        "policy": "live",
        "profile": "quick",
        "seed": 0,
        "verdict": verdict,
        "partial": False,
        "programs": 100,
        "seconds": 10.0,
        "decisive_steps": 5,
        "broken": [],
        "verdicts": {},
        "versions": {"mlx": "1"},
    }
    return made | changes


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "history.jsonl"
    assert read(file) == []
    append(file, [entry("2026-01-02")])
    append(file, [entry("2026-01-01"), entry("2026-01-03")])
    assert [one["at"] for one in read(file)] == ["2026-01-01", "2026-01-02", "2026-01-03"]


def test_a_line_that_was_cut_is_left_out_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    append(file, [entry("2026-01-01")])
    with file.open("a") as opened:
        opened.write('{"at": "2026-01-0')  # killed while writing
    assert [one["at"] for one in read(file)] == ["2026-01-01"]
    append(file, [entry("2026-01-03")])
    assert [one["at"] for one in read(file)] == ["2026-01-01", "2026-01-03"]
    assert all(json.loads(line) for line in file.read_text().splitlines())


WRONG = (
    *({"at": 5}, {"target": ["x"]}, {"broken": None}, {"programs": 1.5}, {"programs": -1}, {"decisive_steps": 10**400}),
    *({"seconds": odd} for odd in ("x", float("nan"), 1e-320, -1.0, True, 1e300)),
    *(
        {"verdict": "GOOD"},
        {"verdict": "LIMITATION"},
        {"verdicts": {"p": "x"}},
        {"verdicts": {"p": []}},
        {"target": "\ud800"},
    ),
)


@pytest.mark.parametrize(
    "line", ["{}", "[]", "x", '{"at": 1}', "null", *(json.dumps(entry("2026-01-02") | one) for one in WRONG)]
)
def test_a_line_that_is_no_entry_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "history.jsonl"
    append(file, [entry("2026-01-01")])
    with file.open("a") as opened:
        opened.write(f"{line}\n")
    with pytest.raises(HistoryError, match="line 2 is no entry"):
        read(file)


def test_merging_has_no_order_and_can_be_repeated(tmp_path: Path) -> None:
    a, b, c = entry("2026-01-01", "a"), entry("2026-01-02", "b"), entry("2026-01-01", "c")
    parts = [[b, a], [a], [c]]
    files = []
    for number, part in enumerate(parts):
        files.append(tmp_path / f"{number}.jsonl")
        append(files[-1], part)
    results = set()
    for number, order in enumerate(itertools.permutations(files)):
        into = tmp_path / f"into-{number}.jsonl"
        for other in (*order, order[0]):
            merge(into, [other])
        results.add(into.read_text())
    (one,) = results
    assert [json.loads(line)["target"] for line in one.splitlines()] == ["a", "c", "b"]


def test_the_index_says_last_good_and_first_bad() -> None:
    runs = [
        entry("2026-01-01T00:00", programs=10),
        entry("2026-01-02T00:00", seed=7, programs=40),
        entry("2026-01-03T00:00", verdict="FAIL", broken=["p"], seed=8),
        entry("2026-01-04T00:00", verdict="FAIL", broken=["q"]),
        entry("2026-01-05T00:00", partial=True, verdict="INCONCLUSIVE"),
        entry("2026-01-05T00:00", "reference:b", "VACUOUS"),
    ]
    a, b = [line for line in index_markdown([], [], runs).splitlines() if line.startswith("| reference:")]
    cells = [cell.strip() for cell in a.split("|")[1:-1]]
    assert cells[:6] == ["reference:a", "no report", "2026-01-02, seed 7", "2026-01-03, seed 8: p", "5", "350"]
    assert cells[6] == "▁▄██ 10.0" and cells[7] == "████ 5" and cells[8] == "-"
    cells = [cell.strip() for cell in b.split("|")[1:5]]
    assert cells == ["reference:b", "no report", "-", "2026-01-05, seed 0: VACUOUS"]


def test_an_interrupted_run_that_fails_is_the_first_bad_one() -> None:
    good, cut = entry("2026-01-01"), entry("2026-01-02", verdict="FAIL", partial=True, broken=["p"])
    said = index_markdown([], [], [good, cut, entry("2026-01-03", verdict="FAIL", broken=["q"])])
    assert "| 2026-01-02, seed 0: p |" in said.replace("  ", " ")


FAMILY = "nemotron_nas"
NAME = f"reference-{FAMILY}.json"


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a right model and of the historic bug."""
    out = tmp_path_factory.mktemp("reports")
    for policy in ("live", "offset"):
        target = f"reference:{FAMILY}:plain:rows"
        cli.main(["run", "--target", target, "--profile", "smoke", "--policy", policy, "--out", str(out), "--history"])
    return out


def test_pages_come_from_the_records_alone(reports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o"
    shutil.copytree(reports, out)
    pages = {path.name: path.read_text() for path in (out / "targets").iterdir() if path.suffix != ".json"}
    for path in (out / "targets").iterdir():
        if path.suffix != ".json":
            path.unlink()
    assert cli.main(["report", "--out", str(out)]) == 0
    assert {path.name: path.read_text() for path in (out / "targets").iterdir() if path.suffix != ".json"} == pages
    assert [one for one in pages.values() if "<svg" in one]
    said = capsys.readouterr().out
    assert "reports: 2, runs: 2" in said and (out / "index.md").read_text() in said
    assert "<h1>Reports</h1>" in (out / "index.html").read_text()
    before = (out / "index.md").read_text()
    assert cli.main(["report", "--out", str(out)]) == 0 and (out / "index.md").read_text() == before


def test_validations_are_in_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, numbers = (
        tmp_path / "o",
        ["--max-kv-size", "16", "--prefill-chunk-size", "8", "--tokens", "40", "--decode", "2"],
    )
    assert cli.main(["synth", FAMILY, str(tmp_path / "mine")]) == 0
    assert cli.main(["validate", str(tmp_path / "mine"), *numbers, "--out", str(out), "--after", "offset"]) == 1
    (page,) = (out / "checkpoints").glob("*.html")
    before = page.read_text()
    assert cli.main(["report", "--out", str(tmp_path / "all"), "--merge", str(out)]) == 0
    assert f"| mine         | {FAMILY} | FAIL      | P=16 C=8 N=40 K=2  |" in capsys.readouterr().out
    assert (tmp_path / "all" / "checkpoints" / page.name).read_text() == before and "<svg" in before


def test_shards_are_merged_in_any_order(reports: Path, tmp_path: Path) -> None:
    worse = tmp_path / "worse"
    shutil.copytree(reports, worse)
    record = worse / "targets" / NAME
    record.write_text(json.dumps(json.loads(record.read_text()) | {"verdict": "INCONCLUSIVE"}))
    texts = []
    for number, order in enumerate(((reports, worse), (worse, reports), (worse, reports, worse))):
        out = tmp_path / str(number)
        merged = [argument for folder in order for argument in ("--merge", str(folder))]
        assert cli.main(["report", "--out", str(out), *merged]) == 0
        texts.append({str(path.relative_to(out)): path.read_text() for path in sorted(out.rglob("*.*"))})
    assert texts[0] == texts[1] == texts[2]
    assert json.loads(texts[0][f"targets/{NAME}"])["verdict"] == "INCONCLUSIVE"  # of one name the worse one stays


def test_what_cannot_be_reported(reports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--out", str(tmp_path / "none")]) == 2
    out = tmp_path / "o"
    shutil.copytree(reports, out)
    record = json.loads((out / "targets" / NAME).read_text())
    findings = json.loads(next((out / "targets").glob("*offset-mask.json")).read_text())["findings"]
    odd = [json.dumps(record | {"findings": [findings[0] | {"replay": replay}]}) for replay in ("a b 'x", 5)]
    bad = ["{", '{"schema": "y"}', "[" * 100_000, *odd]
    for name, text in (*(("targets/x.json", each) for each in bad), ("history.jsonl", "{}\n")):
        (out / name).write_text(text)
        assert cli.main(["report", "--out", str(out)]) == 2
        if name.startswith("targets"):
            (out / name).unlink()
    err = capsys.readouterr().err
    assert err.count("\n") == 2 + len(bad) and "Traceback" not in err and "line 1 is no entry" in err
