"""The pytest plugin, in processes of its own: as another repository would use it, with nothing of ours beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
RIGHT = "reference:nemotron_nas:plain:rows"
ABORTS = f"wire:{sys.executable} {ROOT / 'tests' / 'wire' / 'misbehaving.py'} abort wide"
INSTALLED = any(entry.value == "harness.pytest_plugin" for entry in metadata.entry_points(group="pytest11"))


def in_a_project(folder: Path, *arguments: str, tests: str = "") -> subprocess.CompletedProcess[str]:
    """pytest in a folder with one test module, or none."""
    if tests:
        (folder / "test_theirs.py").write_text(tests)
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    env.pop("PYTEST_ADDOPTS", None)
    plugin = () if INSTALLED else ("-p", "harness.pytest_plugin")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *plugin, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


def smoke(target: str, *more: str) -> tuple[str, ...]:
    return "--kv-target", target, "--kv-profile", "smoke", *more


def test_a_right_target_passes_in_several_processes_with_its_planted_bug(tmp_path: Path) -> None:
    done = in_a_project(tmp_path, *smoke(RIGHT, "-n", "2", "--junitxml", "junit.xml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout and not (tmp_path / "reports").exists()
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("mask_shows_exactly_the_visible_set"))
    assert row.split() == ["mask_shows_exactly_the_visible_set", "PASS"]
    cases = ElementTree.parse(tmp_path / "junit.xml").getroot().findall(".//testcase")
    assert {case.get("name") for case in cases} == {f"{RIGHT}[plain-rows]", f"{RIGHT}[planted bug]"}
    assert {case.get("classname") for case in cases} == {"kv-harness"}
    (told,) = (case.find("properties/property") for case in cases if case.get("name", "").endswith("[plain-rows]"))
    assert told is not None and told.get("name") == "kv_harness"
    value = json.loads(told.get("value") or "")
    assert value["target"] == RIGHT and value["programs"] > 0
    assert value["properties"]["mask_shows_exactly_the_visible_set"] == "PASS"


def test_a_known_failure_is_named_and_still_fails(tmp_path: Path) -> None:
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")
    if mlx_lm.__version__ != "0.32.2":
        pytest.skip("the record is of 0.32.2")
    done = in_a_project(tmp_path, *smoke("mlx_lm:gpt_bigcode"))
    assert done.returncode == 1 and "1 failed" in done.stdout, done.stdout + done.stderr
    assert "KNOWN  every_operation_completes" in done.stdout and "known     gpt_bigcode_no_batch: " in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if line.split()[:1] == ["every_operation_completes"])
    assert row.split() == ["every_operation_completes", "KNOWN"]


@pytest.mark.parametrize("more", [(), ("-n", "2"), ("--kv-target", RIGHT)])
def test_a_name_can_be_given_back(tmp_path: Path, more: tuple[str, ...]) -> None:
    """As it is printed; pytest looks for no file of that name, and a test of the project stays out."""
    name = f"kv-harness::{RIGHT}[planted bug]"
    done = in_a_project(tmp_path, "--kv-profile", "smoke", "-v", *more, name, tests="def test_theirs(): assert 0\n")
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"PASSED {name}" if "-n" in more else f"{name} PASSED"
    assert "1 passed" in done.stdout and said in done.stdout
    both = in_a_project(tmp_path, "--kv-profile", "smoke", *more, name, "test_theirs.py")
    assert both.returncode == 1 and "1 failed, 1 passed" in both.stdout


def test_a_name_that_is_none_of_them_is_one_line(tmp_path: Path) -> None:
    done = in_a_project(tmp_path, "--kv-profile", "smoke", f"kv-harness::{RIGHT}[int9]")
    (line,) = (line for line in (done.stderr + done.stdout).splitlines() if line.startswith("ERROR"))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and f"kv-harness::{RIGHT}[planted bug]" in line


@pytest.mark.parametrize("name", ["kv-harness::", f"kv-harness::{RIGHT}", f"kv-harness::{RIGHT}[", "kv-harness::[x]"])
def test_a_name_without_its_configuration_is_one_line(tmp_path: Path, name: str) -> None:
    done = in_a_project(tmp_path, "--kv-profile", "smoke", name)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert line.endswith(f"not found: {name} (a test is called kv-harness::TARGET[CONFIGURATION])")


def test_what_is_collected_is_counted_and_listed(tmp_path: Path) -> None:
    done = in_a_project(tmp_path, *smoke(RIGHT, "--collect-only"), tests="def test_theirs(): pass\n")
    assert done.returncode == 0 and "collected 3 items" in done.stdout
    assert "<Targets kv-harness>" in done.stdout and f"<Configuration {RIGHT}[plain-rows]>" in done.stdout
    quiet = in_a_project(tmp_path, *smoke(RIGHT, "--collect-only", "-q"))
    assert f"kv-harness::{RIGHT}[plain-rows]" in quiet.stdout.splitlines()
    chosen = in_a_project(tmp_path, *smoke(RIGHT, "-k", "planted"))
    assert "collected 3 items / 2 deselected / 1 selected" in chosen.stdout


def test_a_bug_is_told_with_its_program_and_replays(tmp_path: Path) -> None:
    done = in_a_project(tmp_path, *smoke(ABORTS, "--kv-out", "o", "--junitxml", "junit.xml"))
    assert done.returncode == 1 and "collected 1 item" in done.stdout
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot().find("testsuite")
    assert suite is not None and (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("1", "1", "0")
    failure = suite.find("testcase/failure")
    assert failure is not None and "FAIL  every_operation_completes" in (failure.text or "")
    assert "program   " in (failure.text or "") and "kv-harness replay" in (failure.text or "")
    assert "FAIL  every_operation_completes" in done.stdout and "killed by SIGABRT" in done.stdout
    assert "Traceback" not in done.stdout and "harness/campaign.py" not in done.stdout
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("every_operation_completes  "))
    assert row.split() == ["every_operation_completes", "FAIL"]
    (trace,) = (tmp_path / "o" / "findings").glob("every_operation_completes-*.json")
    assert f"kv-harness replay {trace.relative_to(tmp_path)} --run-command" in done.stdout
    replay = [sys.executable, "-m", "harness.cli", "replay", str(trace), "--run-command"]
    again = subprocess.run(replay, cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 1 and again.stdout.startswith("FAILED  every_operation_completes is still broken")


@pytest.mark.parametrize(
    ("chosen", "passed"), [(("-k", "planted"), 1), (("-m", "kv_harness"), 2), (("-m", "not kv_harness"), 1)]
)
def test_names_and_the_marker_choose(tmp_path: Path, chosen: tuple[str, str], passed: int) -> None:
    done = in_a_project(tmp_path, *smoke(RIGHT, *chosen), tests="def test_theirs(): pass\n")
    assert done.returncode == 0 and f"{passed} passed" in done.stdout and "deselected" in done.stdout


@pytest.mark.parametrize(
    ("target", "told"), [("reference:qwen9", "qwen9"), ("nothing", "a target is named"), ("mlx_lm:no_such", "no_such")]
)
def test_a_target_that_does_not_exist_is_one_line(tmp_path: Path, target: str, told: str) -> None:
    done = in_a_project(tmp_path, "--kv-target", target)
    errors = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("ERROR")]
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "Traceback" not in done.stdout + done.stderr
    assert len(errors) == 1 and told in errors[0]


@pytest.mark.parametrize("arguments", [("--kv-target", ""), ("--kv-target", RIGHT, "--kv-seed", "-1")])
def test_what_would_verify_nothing_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = in_a_project(tmp_path, *arguments, tests="def test_theirs(): pass\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "ERROR: --kv-" in done.stderr + done.stdout


def test_without_the_option_nothing_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours but the plugin is imported, and no test is added."""
    looks = """
import os, sys

def test_theirs():
    ours = {name for name in sys.modules if name.split(".")[0] in ("harness", "properties", "reference_models")}
    assert ours <= {"harness", "harness.pytest_plugin"}
    assert "mlx" not in sys.modules and "MLX_DISABLE_COMPILE" not in os.environ
"""
    for name in ("MLX_DISABLE_COMPILE", "MLX_ENABLE_TF32", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    done = in_a_project(tmp_path, tests=looks)
    assert done.returncode == 0 and "1 passed" in done.stdout and "= kv-harness =" not in done.stdout
