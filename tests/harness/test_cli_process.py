"""The command line as a process: interrupts, pipes that close, disks that are full."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAMILY = "qwen2_vl"
SMALL = f"--target reference:{FAMILY}:one-layer --profile smoke --programs 8"  # a run of seconds


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "MLX_DISABLE_COMPILE": "1"}


def start(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness.cli", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def test_as_a_process_a_refusal_is_one_line_and_no_traceback() -> None:
    for arguments, code in ((("replay", "none.json"), 2), (("run", "--families", "none"), 2)):
        process = start(*arguments)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out, err.count("\n")) == (code, "", 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
def test_an_interrupted_run_leaves_a_report_marked_partial(number: signal.Signals, tmp_path: Path) -> None:
    process = start("run", "--families", f"{FAMILY},qwen3_vl", "--profile", "nightly", "--out", "o")
    assert process.stdout is not None
    assert "profile nightly" in process.stdout.readline()  # the first line stands: the campaign begins
    time.sleep(1.5)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err == ""
    assert f"interrupted in {FAMILY}; its report is marked partial" in out
    report = json.loads((tmp_path / "o" / "families" / f"{FAMILY}.json").read_text())
    assert report["partial"] is True
    left = sorted(path.name for path in (tmp_path / "o" / "families").iterdir())
    reports = [f"{FAMILY}.{kind}" for kind in ("html", "json", "md")]  # no other one, but what was not run is marked
    assert left == sorted((*reports, f"{FAMILY}-images.partial", "qwen3_vl-images.partial", "qwen3_vl.partial"))


@pytest.mark.parametrize(
    "arguments",
    [
        ("properties",),
        ("run", *SMALL.split(), "--no-strict", "--out", "o"),
    ],
    ids=["properties", "run"],
)
def test_a_reader_that_has_seen_enough_is_no_error(arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = without_progress(process.stderr.read())
    process.stderr.close()
    assert (process.wait(120), err) == (0, "")


def without_progress(err: str) -> str:
    """stderr less the lines that a slow machine is shown every half minute."""
    return "".join(
        line for line in err.splitlines(keepends=True) if not re.fullmatch(r"\S+: \d+ of \d+ programs\n", line)
    )


def piped(line: str) -> subprocess.CompletedProcess[str]:
    """The command line in a shell; the exit code is that of the harness."""
    command = ["bash", "-o", "pipefail", "-c", f'"$0" -m harness.cli {line}', sys.executable]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)


def test_a_run_that_finds_something_says_so_to_whoever_reads_on(tmp_path: Path) -> None:
    done = piped(f"run {SMALL} --policy offset --out o | head -1")
    assert (done.returncode, without_progress(done.stderr)) == (1, "") and done.stdout.count("\n") == 1
    report = tmp_path / "o" / "targets" / f"reference-{FAMILY}@offset-mask.json"
    assert json.loads(report.read_text())["verdict"] == "FAIL"


def test_a_full_disk_under_the_output_is_unusable_and_keeps_the_reports(tmp_path: Path) -> None:
    full = "kv-harness: error: cannot write to standard output: No space left on device\n"
    for line, code, told in (
        ("properties > /dev/full", 2, full),
        (f"run {SMALL} --no-strict --out o > /dev/full", 2, full),
        (
            f"run {SMALL} --policy offset --out p > /dev/full",
            1,
            "",
        ),  # a finding weighs more
    ):
        done = piped(line)
        assert (done.returncode, without_progress(done.stderr)) == (code, told)
    for out, verdicts in (("o", {"PASS", "VACUOUS"}), ("p", {"FAIL"})):
        (report,) = (tmp_path / out / "targets").glob("*.json")
        assert json.loads(report.read_text())["verdict"] in verdicts
