"""The command line: exit codes, one line on stderr, no traceback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import properties
from harness import cli
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import judge_program
from harness.operations import Chunk, Prefill, Program, TrimFront
from harness.profiles import Profile
from harness.recording import record
from harness.targets import reference
from harness.trace import Trace

ROOT = Path(__file__).parents[2]
FAMILY = "qwen2_vl"
PROGRAM = Program((Prefill(6), TrimFront(2), Chunk(3)))


@pytest.fixture(autouse=True)
def _handler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """``main`` changes the handler of SIGTERM; and a run may write where it stands."""
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.PROFILES, "quick", Profile("quick", programs=24, operations=5, shrink=False))


def trace(policy: str = "offset", changes: dict[str, Any] | None = None) -> Trace:
    target = reference.targets(FAMILY, policy)[0]  # type: ignore[arg-type]
    finding = None
    try:
        judge_program(target, PROGRAM, properties.ALL)
    except FindingError as error:
        finding = error.finding
    made = record(execute(target, PROGRAM), finding, {})
    return Trace(made.target | (changes or {}), made.program, made.finding, made.steps, {})


def file(trace: Trace) -> str:
    path = Path(trace.file_name)
    path.write_text(trace.to_text())
    return str(path)


def unusable(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command line on input that it must refuse; returns the one line."""
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.endswith("\n") and len(err) < 400
    return err


def test_replay_of_a_bug_that_is_still_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", file(trace())]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == "FAILED  mask_key_axis_equals_live_keys is still broken"
    assert "Prefill(6) ; TrimFront(2) ; Chunk(3)" in out


def test_replay_of_a_bug_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", file(trace(policy="live"))]) == 0
    assert cli.main(["replay", file(trace(changes={"policy": "live"}))]) == 0
    out, _ = capsys.readouterr()
    assert out.splitlines()[0].startswith("FIXED   the trace records no finding")
    assert out.splitlines()[1].startswith("FIXED   mask_key_axis_equals_live_keys holds now")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "mlx_lm"}, "unknown kind of target 'mlx_lm'"),
        ({"family": "qwen2_v"}, "nearest: qwen2_vl"),
        ({"family": None}, "family must be text"),
        ({"family": ["x"]}, "family must be text"),
        ({"variant": "huge"}, "has no variant 'huge'"),
        ({"variant": {}}, "variant must be text"),
        ({"variant": []}, "variant must be text"),
        ({"policy": "dead"}, "policy is one of live, offset"),
        ({"policy": []}, "policy must be text"),
        ({"storage": None}, "storage must be text"),
        ({"storage": "int4"}, "storage one of rows, int8"),
        ({"weights_seed": -1}, "weights_seed must be"),
        ({"weights_seed": True}, "weights_seed must be"),
        ({"weights_seed": 1.5}, "weights_seed must be"),
        ({"weights_seed": 2**32}, "weights_seed must be"),
        ({"path": "/etc/passwd"}, "exactly the fields"),
    ],
)
def test_replay_of_a_target_that_does_not_exist(
    changes: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    name = file(trace(changes=changes))
    line = unusable(capsys, "replay", name)
    assert line.startswith("ERROR ") and name in line and why in line


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, "\udcff", '{"a": NaN}', None])
def test_replay_of_what_is_no_trace(content: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if content is not None:
        Path("t.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert unusable(capsys, "replay", "t.json").startswith("ERROR   t.json: ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "COMMAND"),
        (["prove"], "'prove'"),
        (["replay"], "file"),
        (["families", "extra"], "extra"),
        (["run", "--families", "qwen2"], "nearest: qwen2_vl"),
        (["run", "--families", f"{FAMILY},xxxx"], "'xxxx'; nearest: mistral4"),
        (["run", "--families", ""], "names no family"),
        (["run", "--families", " , "], "names no family"),
        (["run", "--seed", "-1"], "must lie in [0, 2**32), got -1"),
        (["run", "--seed", str(2**32)], "must lie in"),
        (["run", "--seed", "one"], "'one'"),
        (["run", "--seed", "1.0"], "'1.0'"),
        (["run", "--seed", "9" * 50], "must lie in"),
        (["run", "--profile", "huge"], "'huge'"),
        (["run", "--policy", "dead"], "'dead'"),
        (["run", "--progams", "3"], "--progams"),
    ],
)
def test_arguments_that_mean_nothing(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = unusable(capsys, *arguments)
    assert line.startswith("kv-harness: error: ") and why in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("inside", ["", "below"])
def test_reports_that_cannot_be_written_are_told_before_anything_runs(
    inside: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    out = tmp_path / "taken" / inside
    line = unusable(capsys, "run", "--families", FAMILY, "--out", str(out))
    assert f"cannot write reports to {out}" in line
    assert (tmp_path / "taken").read_text() == "a file"


def test_families_and_properties(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families"]) == 0
    listed = capsys.readouterr().out
    for family in reference.FAMILIES:
        assert family in listed
    assert "int8" in listed
    assert cli.main(["properties"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith(" ")] == [prop.id for prop in properties.ALL]
    assert sum(line.startswith("    decisive: ") for line in lines) == len(properties.ALL)
    assert max(map(len, lines)) <= 110


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_are_clean(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([option])
    assert caught.value.code == 0 and "kv-harness" in capsys.readouterr().out


@pytest.mark.usefixtures("_small")
def test_a_run_with_the_bug_leaves_reports_and_traces_that_replay(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["run", "--families", f"{FAMILY}, {FAMILY}", "--policy", "offset", "--seed", "3", "--out", "o"]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert err == "" and "seed 3, policy offset" in out and "FAIL  mask_key_axis_equals_live_keys" in out
    report = json.loads((tmp_path / "o" / "families" / f"{FAMILY}.json").read_text())
    assert report["verdict"] == "FAIL" and report["partial"] is False
    assert (tmp_path / "o" / "families" / f"{FAMILY}.md").read_text()
    found = sorted((tmp_path / "o" / "findings").glob("*.json"))
    assert len(found) == len(report["findings"]) >= 1
    for path in found:
        assert cli.main(["replay", str(path)]) == 1
    assert "Traceback" not in "".join(capsys.readouterr())
    assert [path.name for path in (tmp_path / "o").iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("_small")
def test_a_run_without_the_bug_has_a_control_that_found_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.main(["run", "--families", FAMILY, "--no-strict", "--out", "o"])
    report = json.loads((tmp_path / "o" / "families" / f"{FAMILY}.json").read_text())
    assert (code, report["findings"], report["partial"]) == (0, [], False)
    assert report["control"] is not None and "mask_key_axis" in json.dumps(report["control"])
    assert capsys.readouterr().err == ""


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
    assert report["partial"] is True and report["coverage"]["programs"] > 0
    assert [path.name for path in (tmp_path / "o" / "families").iterdir() if "qwen3" in path.name] == []


@pytest.mark.parametrize(
    "arguments", [("properties",), ("run", "--families", FAMILY, "--out", "o")], ids=["properties", "run"]
)
def test_a_reader_that_has_seen_enough_is_no_error(arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert (process.wait(60), err) == (0, "")
