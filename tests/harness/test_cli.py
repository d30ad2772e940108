"""The command line: exit codes, one line on stderr, no traceback."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import tempfile
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
from harness.profiles import PROFILES, Profile
from harness.recording import record
from harness.targets import reference
from harness.trace import Trace

ROOT = Path(__file__).parents[2]
FAMILY = "qwen2_vl"
PROGRAM = Program((Prefill(6), TrimFront(2), Chunk(3)))


@pytest.fixture(autouse=True)
def _handler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """``main`` changes the handlers of two signals; and a run may write where it stands, and is never slow."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("harness.progress.SILENCE", float("inf"))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROFILES, "quick", Profile("quick", programs=24, operations=5, shrink=False))
    two_each = Profile("smoke", programs=1, operations=5, shrink=False, least=2, patience=0)
    monkeypatch.setitem(PROFILES, "smoke", two_each)


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
    name = reference.targets(FAMILY, "offset")[0].identity.full_name
    assert out.splitlines()[-1] == f"      target    {name}" and name.startswith(f"reference/{FAMILY}@offset-mask ")


def test_replay_of_a_finding_that_never_came_back_is_an_error_once_it_is_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = trace(changes={"policy": "live"})
    assert made.finding is not None
    name = file(dataclasses.replace(made, finding={**made.finding, "reproducible": False}))
    assert "did not come back in a fresh model" in unusable(capsys, "replay", name)


def test_replay_of_a_trace_with_nothing_to_replay(capsys: pytest.CaptureFixture[str]) -> None:
    empty = dataclasses.replace(trace(policy="live"), program=Program(()), steps=())
    assert "there is nothing to replay" in unusable(capsys, "replay", file(empty))


def test_replay_of_a_bug_that_is_gone(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", file(trace(policy="live"))]) == 0
    assert cli.main(["replay", file(trace(changes={"policy": "live"}))]) == 0
    out, _ = capsys.readouterr()
    none, program, target, holds, *_ = out.splitlines()
    assert none.startswith("FIXED   the trace records no finding") and program == f"      program   {PROGRAM}"
    assert "qwen2_vl@live-mask variant" in target and holds.startswith("FIXED   mask_key_axis_equals_live_keys holds")


def test_replay_of_another_program_than_the_recorded_one_is_not_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    """Edited by hand to a program that cannot show the bug: FIXED would be said of a target that has it."""
    recorded = trace()
    edited = dataclasses.replace(recorded, program=Program((Prefill(6), Chunk(2), Chunk(2))))
    assert "its steps are not those of its program" in unusable(capsys, "replay", file(edited))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "vllm"}, "unknown kind of target 'vllm'"),
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
        ({"storage": "affine8", "variant": "one-layer"}, "does not fit affine8 caches"),
        ({"storage": "rotating-layers"}, "does not fit rotating-layers caches"),
        ({"weights_seed": -1}, "weights_seed must be"),
        ({"weights_seed": True}, "weights_seed must be"),
        ({"weights_seed": 1.5}, "weights_seed must be"),
        ({"weights_seed": 2**32}, "weights_seed must be"),
        ({"file": "/etc/passwd"}, "with the fields"),
        ({"path": "/etc/passwd"}, "path is one of text, images"),
        ({"path": ["images"]}, "path is one of text, images"),
        ({"path": "images"}, "has no vision tower"),
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
        (["run", "--families", f"{FAMILY},xxxx"], "'xxxx'; nearest: cohere2"),
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
        (["run", "--jobs", "0"], "argument --jobs: must be auto or lie in [1, 512], got '0'"),
        (["run", "--jobs", "-1"], "--jobs"),
        (["run", "--jobs", "all"], "got 'all'"),
        (["faults", "--jobs", "513"], "must be auto or lie in"),
        (["faults", "--jobs", "\u0663"], "must be auto or lie in"),
        (["faults", "--list", "--families", "zzz"], "argument --families: unknown 'zzz'"),
        (["faults", "--list", "--only", "zzz"], "argument --only: unknown 'zzz'"),
    ],
)
def test_arguments_that_mean_nothing(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = unusable(capsys, *arguments)
    assert line.startswith("kv-harness: error: ") and why in line
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a campaign was run")

    monkeypatch.setattr("harness.runner.run_campaign", never)


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("inside", ["", "below", "below/it"])
def test_reports_that_cannot_be_written_are_told_before_anything_runs(
    inside: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "taken").write_text("a file")
    out = tmp_path / "taken" / inside
    line = unusable(capsys, "run", "--families", FAMILY, "--out", str(out))
    assert f"error: cannot write reports: {tmp_path / 'taken'}" in line and line.endswith(": Not a directory\n")
    assert (tmp_path / "taken").read_text() == "a file"


@pytest.mark.usefixtures("_nothing_runs")
@pytest.mark.parametrize("kind", ["json", "md"])
def test_a_folder_where_a_report_should_go_is_told_before_anything_runs(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    there = tmp_path / "o" / "families" / f"{FAMILY}.{kind}"
    there.mkdir(parents=True)
    line = unusable(capsys, "run", "--families", f"qwen3_vl,{FAMILY}", "--out", str(tmp_path / "o"))
    assert line.endswith(f"error: cannot write reports: {there}: is a folder, a report would go there\n")
    assert there.is_dir()


@pytest.mark.usefixtures("_nothing_runs")
def test_findings_that_cannot_be_written_are_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "findings").write_text("a file")
    line = unusable(capsys, "run", "--families", FAMILY, "--out", "o")
    assert line.endswith("error: cannot write reports: o/findings: File exists\n")


@pytest.mark.usefixtures("_nothing_runs")
def test_a_findings_folder_without_permission_is_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tempfile.TemporaryFile

    def refusing(*arguments: Any, **named: Any) -> Any:  # root may write everywhere
        if Path(named["dir"]).name == "findings":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(named["dir"]))
        return made(*arguments, **named)

    monkeypatch.setattr(tempfile, "TemporaryFile", refusing)
    line = unusable(capsys, "run", "--families", FAMILY, "--out", "o")
    assert line.endswith("error: cannot write reports: o/findings: Permission denied\n")


@pytest.mark.usefixtures("_nothing_runs")
def test_a_folder_whose_name_is_no_text_is_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    line = unusable(capsys, "run", "--families", FAMILY, "--out", "o\udcff")
    assert "cannot write reports: " in line and "\\udcff" in line and "is not UTF-8" in line
    assert list(tmp_path.iterdir()) == []


def test_families_and_properties(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["families"]) == 0
    listed = capsys.readouterr().out
    for family in reference.FAMILIES:
        assert family in listed
    assert "int8" in listed
    for kind, some in (("mlx_lm", ("nemotron_nas", "tiny, linear-first")), ("mlx_vlm", ("qwen2_vl",))):
        assert cli.main(["families", "--kind", kind]) == 0
        listed = capsys.readouterr().out
        assert all(name in listed for name in some) and "int8" not in listed
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
    arguments = [
        "run",
        "--families",
        f"{FAMILY}, {FAMILY}",
        "--policy",
        "offset",
        "--seed",
        "3",
        "--profile",
        "smoke",
        "--out",
        "o",
    ]
    assert cli.main(arguments) == 1
    out, err = capsys.readouterr()
    assert err == "" and "seed 3, policy offset" in out and "FAIL  mask_key_axis_equals_live_keys" in out
    report = json.loads((tmp_path / "o" / "families" / f"{FAMILY}@offset-mask.json").read_text())
    assert report["verdict"] == "FAIL" and report["partial"] is False
    assert (tmp_path / "o" / "families" / f"{FAMILY}@offset-mask.md").read_text()
    images = json.loads((tmp_path / "o" / "families" / f"{FAMILY}-images@offset-mask.json").read_text())
    assert (report["path"], images["path"], images["verdict"]) == ("text", "images", "FAIL")
    found = sorted((tmp_path / "o" / "findings").glob("*.json"))
    assert len(found) == len(report["findings"]) + len(images["findings"]) >= 2
    for path in found:
        assert cli.main(["replay", str(path)]) == 1
    assert "Traceback" not in "".join(capsys.readouterr())
    assert [path.name for path in (tmp_path / "o").iterdir() if path.name.startswith(".")] == []


@pytest.mark.usefixtures("_small")
def test_a_run_without_the_bug_has_a_control_that_found_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code = cli.main(["run", "--families", FAMILY, "--no-strict", "--profile", "smoke", "--out", "o"])
    report = json.loads((tmp_path / "o" / "families" / f"{FAMILY}.json").read_text())
    assert (code, report["findings"], report["partial"]) == (0, [], False)
    assert report["control"] is not None and "mask_key_axis" in json.dumps(report["control"])
    assert capsys.readouterr().err == ""
