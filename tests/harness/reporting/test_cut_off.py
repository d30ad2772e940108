"""What a run that was killed leaves: never the report of an earlier one in its place, and a line on what is missing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness import cli
from harness.reporting import cut_off
from tests.harness.reporting.test_report import Record, put, shard

ROOT = Path(__file__).parents[3]
FIRST, SECOND = "reference:qwen2_vl:one-layer", "reference:nemotron_nas"
PLACE = "targets/reference-qwen2_vl"


def run(out: Path, target: str, *options: str) -> int:
    return cli.main(["run", "--target", target, "--no-strict", "--out", str(out), *(options or ("--profile", "smoke"))])


def test_kill_9_leaves_no_older_pass_and_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "o"
    assert run(out, f"{FIRST},{SECOND}", "--profile", "smoke", "--programs", "8") == 0
    assert not list(out.glob("*/*.partial"))
    old = json.loads((out / f"{PLACE}.json").read_text())
    assert old["verdict"] in ("PASS", "VACUOUS")
    other = (out / "targets" / "reference-nemotron_nas.json").read_bytes()

    command = [sys.executable, "-m", "harness.cli", "run", "--target", f"{FIRST},{SECOND}", "--profile", "nightly"]
    process = subprocess.Popen(
        [*command, "--seed", "7", "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLX_DISABLE_COMPILE": "1"},
        cwd=tmp_path,
    )
    marker, deadline = out / f"{PLACE}.partial", time.monotonic() + 120
    try:
        while not (marker.exists() and json.loads(marker.read_text())["begun"]) and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    told = json.loads(marker.read_text())
    assert (told["profile"], told["seed"], told["policy"], told["begun"]) == ("nightly", 7, "live", True)
    assert FIRST in told["command"] and told["since"].startswith("20")
    assert not [kind for kind in cut_off.KINDS if (out / f"{PLACE}.{kind}").exists()]
    assert (out / "targets" / "reference-nemotron_nas.json").read_bytes() == other

    (line,) = cut_off.cut_off(out)
    assert line.startswith("a run was cut off, or still runs (profile nightly, seed 7, policy live, since 20")
    assert (
        f": no report of {PLACE}; not begun, what is there is of an earlier run: targets/reference-nemotron_nas;"
        in line
    )
    capsys.readouterr()
    assert cli.main(["report", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert line in said and f"{PLACE}.md" not in said  # no row of the index
    assert line in (out / "index.md").read_text().replace("\\", "")

    assert run(out, FIRST, "--profile", "smoke", "--programs", "8") == 0
    assert line in capsys.readouterr().out
    assert not marker.exists() and (out / f"{PLACE}.json").exists()
    assert "no report of" not in cut_off.cut_off(out)[0]
    assert run(out, SECOND, "--profile", "smoke", "--programs", "8") == 0
    assert cut_off.cut_off(out) == []


def test_a_shard_that_was_cut_off_takes_the_pass_of_all_shards_with_it(
    records: dict[str, Record], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(tmp_path, shard(records["pass"], 1), shard(records["pass"], 2))
    assert cli.main(["report", "--out", str(tmp_path)]) == 0
    whole, second = tmp_path / "families" / "x", tmp_path / "shards" / "families" / "x" / "2-of-2"
    assert json.loads((tmp_path / "families" / "x.json").read_text())["verdict"] == "PASS"
    cut_off.announce({second: "kv-harness run"}, "quick", 5, "live")
    cut_off.begin(second, whole)
    assert not (tmp_path / "families" / "x.json").exists()
    capsys.readouterr()
    assert cli.main(["report", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "no report of shards/families/x/2-of-2" in said
    made = json.loads((tmp_path / "families" / "x.json").read_text())
    assert made["partial"] is True and made["verdict"] != "PASS"


@pytest.mark.parametrize("kind", ["fail", "pass"])
def test_a_shard_takes_no_other_whole_report(kind: str, records: dict[str, Record], tmp_path: Path) -> None:
    """A FAIL stays, and so does the PASS of a run that was whole: it is another command's."""
    whole = tmp_path / "families" / "x"
    put(tmp_path, whole=records[kind] | ({"shards": {"of": 1, "numbers": [1]}} if kind == "fail" else {}))
    cut_off.begin(tmp_path / "shards" / "families" / "x" / "1-of-2", whole)
    assert whole.with_name("x.json").exists()


def test_what_was_written_before_the_kill_is_no_gap(tmp_path: Path) -> None:
    file = tmp_path / "families" / "x"
    cut_off.announce({file: "c"}, "quick", 0, "live")
    assert "no report of families/x" in cut_off.cut_off(tmp_path)[0]
    file.with_name("x.json").write_text("{}")
    assert "of an earlier run: families/x" in cut_off.cut_off(tmp_path)[0]
    cut_off.begin(file)
    assert "no report of families/x" in cut_off.cut_off(tmp_path)[0]
    file.with_name("x.json").write_text("{}")  # and killed in front of the last step
    assert cut_off.cut_off(tmp_path) == []
    cut_off.end(file)
    cut_off.end(file)
    assert not file.with_name("x.partial").exists()


def test_what_was_refused_leaves_no_marker(tmp_path: Path) -> None:
    begun, waits = tmp_path / "families" / "a", tmp_path / "families" / "b"
    cut_off.announce({begun: "c", waits: "c"}, "quick", 0, "live")
    cut_off.begin(begun)
    cut_off.forget([begun, waits])
    assert [path.name for path in begun.parent.iterdir()] == ["a.partial"]


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b'{"seed": "1\\n2"}', b"[" * 100_000])
def test_a_marker_that_holds_something_else_still_marks(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "families").mkdir()
    (tmp_path / "families" / "x.partial").write_bytes(content)
    (line,) = cut_off.cut_off(tmp_path)
    assert "profile unknown" in line and "no report of families/x;" in line and "\n" not in line


def test_many_names_make_one_line(tmp_path: Path) -> None:
    files = {tmp_path / "families" / f"x{number:02}": "c" for number in range(20)}
    cut_off.announce(files, "quick", 0, "live")
    (line,) = cut_off.cut_off(tmp_path)
    assert "families/x11 and 8 more;" in line
