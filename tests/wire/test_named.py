"""Targets by name on the command line: reports, controls, traces, and what happens when somebody leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.cli import main
from harness.reporting import load_schema
from harness.scratch import LOCK
from harness.targets.naming import JUDGED, Asked, TargetError, resolve, split_names, target_from_identity
from harness.trace import read_trace

ROOT = Path(__file__).parents[2]
WORKER = f"{sys.executable} -m harness.wire.worker reference:qwen2_vl"
FEW = ("--programs", "24", "--no-strict", "--out", "o")


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def report(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((Path("o") / "targets" / f"{name}.json").read_text())
    jsonschema.validate(data, load_schema())
    assert (Path("o") / "targets" / f"{name}.md").read_text().startswith("# KV cache and mask report: ")
    return data


def test_names_are_split_where_a_kind_begins() -> None:
    assert split_names("reference:a, wire:x --y=1,2 --z, reference:b") == [
        "reference:a",
        "wire:x --y=1,2 --z",
        "reference:b",
    ]
    assert split_names(" , ") == [","] and split_names("wire:a,b") == ["wire:a,b"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2_vl", f"a target is named {', '.join(f'{kind}:...' for kind in JUDGED)}, not 'qwen2_vl'"),
        ("mlx-lm:llama", "did you mean 'mlx_lm:llama'?"),
        ("wire:", "names nothing behind its colon"),
        ("reference:qwen2", "qwen2_vl"),
        ("reference:qwen2_vl:none", "qwen2_vl has nothing called 'none'; its variants are one-layer"),
        ("reference:qwen2_vl+sound", "a path is one of text, images, not 'sound'"),
        ("reference:mistral4+images", "mistral4 has no path with images"),
    ],
)
def test_a_name_of_nothing_is_one_line_and_exit_code_2(
    name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--target", name, *FEW]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err and not Path("o").exists()


def test_families_and_targets_do_not_mix(toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    for also in (("--families", "qwen2_vl"), ("--path", "text")):
        assert main(["run", "--target", f"wire:{toy}", *also]) == 2
    assert main(["run", "--target", f"wire:{toy}", "--policy", "offset"]) == 2
    assert "the engine has the mask policy live alone" in capsys.readouterr().err
    assert main(["run", "--target", f"wire:{toy}", "--limit", "0"]) == 2


def test_a_target_of_the_reference_kind_is_the_family() -> None:
    assert main(["run", "--target", "reference:qwen2_vl:one-layer", *FEW]) == 0
    data = report("reference-qwen2_vl")
    assert data["target"] == "reference:qwen2_vl" and data["control"]["caught"]
    assert {one["variant"] for one in data["configurations"]} == {"one-layer"}
    assert data["command"].startswith("kv-harness run --target reference:qwen2_vl:one-layer --profile quick")


def test_a_worker_with_the_other_policy_has_a_control(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--target", f"wire:{WORKER}", *FEW]) == 0
    data = report("wire-qwen2_vl")
    assert data["target"] == "wire:qwen2_vl" and data["control"]["caught"] and data["control_reason"] is None
    assert data["control"]["operations"] <= 4
    verdicts = {prop["id"]: prop["verdict"] for prop in data["properties"]}
    assert "FAIL" not in verdicts.values() and verdicts["outputs_equal_the_witness"] == "NOT APPLICABLE"
    assert data["configurations"][0]["config"]["command"] == WORKER


def test_without_another_policy_the_report_says_that_nothing_was_planted(toy: str) -> None:
    assert main(["run", "--target", f"wire:{toy}", "--programs", "40", "--no-strict", "--out", "o"]) == 0
    data = report("wire-toy")
    assert data["control"] is None
    assert data["control_reason"] == "the target has no other mask policy, so that no bug could be planted in it"
    assert "no planted bug was looked for" in data["verdict_reason"]
    text = (Path("o") / "targets" / "wire-toy.md").read_text()
    assert "Nothing shows that the harness would have found a bug here: the target has no other mask policy" in text


def test_a_trace_runs_its_command_only_when_told(
    misbehaving: Callable[[str, str], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", "--target", f"wire:{misbehaving('abort', 'wide')}", *FEW]) == 1
    out = capsys.readouterr().out
    (file,) = re.findall(r"kv-harness replay (\S+) --run-command$", out, re.M)
    with monkeypatch.context() as patched:
        patched.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it ran something"))
        assert main(["replay", file]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "nothing was run" in err and misbehaving("abort", "wide") in err
    assert main(["replay", file, "--run-command"]) == 1
    assert "every_operation_completes is still broken" in capsys.readouterr().out


def test_a_trace_of_another_engine_is_refused(toy: str) -> None:
    data = resolve(f"wire:{toy}", Asked()).targets[0].identity.to_json()
    again = target_from_identity(data, Asked(run_command=True))
    assert again.identity == resolve(f"wire:{toy}", Asked()).targets[0].identity
    for change, said in (
        ({"family": "llama"}, "its family is 'toy', not 'llama'"),
        ({"policy": "offset"}, "the mask policy live alone"),
        ({"command": 3}, "command must be text"),
        ({"storage": None}, "must be an object with the fields"),
        ({"kind": "none"}, "unknown kind of target 'none'"),
        ({"kind": ["wire"]}, "unknown kind of target"),
    ):
        with pytest.raises(TargetError, match=re.escape(said)):
            target_from_identity(data | change, Asked(run_command=True))


def test_the_trace_says_how_the_engine_died(misbehaving: Callable[[str, str], str]) -> None:
    main(["run", "--target", f"wire:{misbehaving('segv', 'wide')}", *FEW])
    traces = [read_trace(path) for path in (Path("o") / "findings").iterdir()]
    assert [trace.steps[-1]["error"] for trace in traces] == ["EngineDied: the engine was killed by SIGSEGV"]
    assert traces[0].target["command"] == misbehaving("segv", "wide")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_no_worker_outlives_the_harness(
    number: signal.Signals, jobs: str, toy: str, gone: Callable[[int], bool], temporary: Path
) -> None:
    command = [sys.executable, "-m", "harness.cli", "run", "--target", f"wire:{toy}", "--profile", "nightly"]
    process = subprocess.Popen(
        [*command, "--out", "o", "--jobs", jobs, "--target", f"wire:{toy} 2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "MLX_DISABLE_COMPILE": "1"},
    )
    assert process.stdout is not None and b"profile nightly" in process.stdout.readline()
    workers: list[int] = []
    for _ in range(200):
        time.sleep(0.05)
        workers = running(toy)
        if len(workers) == int(jobs):
            break
    process.send_signal(number)
    process.stdout.read()
    process.wait(60)
    process.stdout.close()
    assert len(workers) == int(jobs) and all(gone(pid) for pid in workers)
    for folder in temporary.glob("kv-harness-*") if number == signal.SIGKILL else ():
        # What is killed cannot clear up: the next harness does. Beside the lock that says so nothing is in it.
        assert [each.name for each in folder.iterdir()] in ([], [LOCK])
        shutil.rmtree(folder)


def running(command: str) -> list[int]:
    """Processes of a worker that were started from here."""
    if not Path("/proc/self/cmdline").exists():
        pytest.skip("needs /proc")
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            here = (folder / "cwd").readlink() == Path.cwd()
        except OSError:
            continue
        if here and words[:3] == command.split()[:3]:
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize(
    ("then", "said", "others", "code", "words"),
    [
        pytest.param("right", "", [], 2, "did not come back in a fresh model when it was recorded either", id="right"),
        pytest.param(
            "gone",
            " (run again, it ended before that: EngineDied: the engine exited with code 3)",
            [("every_operation_completes", True)],
            1,
            "every_operation_completes",
            id="gone",
        ),
    ],
)
def test_what_an_engine_shows_once_is_told_with_the_program_that_showed_it(
    then: str, said: str, others: list[Any], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """No error, and nothing that is dropped: a finding, said not to have come back. Its replay is not FIXED."""
    command = f"{sys.executable} {Path(__file__).parent / 'sometimes.py'} {Path('once').absolute()} {then}"
    assert main(["run", "--target", f"wire:{command}", *FEW]) == 1
    out = capsys.readouterr().out
    data = report("wire-toy")
    (found,) = (each for each in data["findings"] if each["property"] == "positions_are_absolute")
    assert not found["reproducible"] and found["message"].endswith(said) and data["verdict"] == "FAIL"
    assert [(each["property"], each["reproducible"]) for each in data["findings"] if each != found] == others
    assert {"trim_front", "enforce_max_kv_size"} & {each["op"] for each in found["program_json"]["operations"]}
    assert out.count("again     it did not come back in a target made new") == 1
    assert "It did not come back in a fresh session." in (Path("o") / "targets" / "wire-toy.md").read_text()
    (trace,) = (path for path in (Path("o") / "findings").iterdir() if "positions_are_absolute" in path.name)
    assert read_trace(trace).finding["reproducible"] is False  # type: ignore[index]
    assert main(["replay", str(trace), "--run-command"]) == code
    told = capsys.readouterr()
    assert words in told.out + told.err
