"""The pytest plugin, in processes of its own: as another repository would use it, with nothing of ours beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.verifying import verify

ROOT = Path(__file__).parents[1]
RIGHT = "reference:nemotron_nas:plain:rows"
ABORTS = f"wire:{sys.executable} {ROOT / 'tests' / 'wire' / 'misbehaving.py'} abort wide"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]


def installed(folder: Path) -> Path:
    """A folder as an install of the wheel makes it, entry point and all. It comes before what is really installed."""
    site = folder.parent / f"{folder.name}-site"
    if not site.exists():
        (site / "mlx_kv_harness-0.1.0.dist-info").mkdir(parents=True)
        (entry,) = PROJECT["project"]["entry-points"]["pytest11"].items()
        told = site / "mlx_kv_harness-0.1.0.dist-info"
        (told / "entry_points.txt").write_text(f"[pytest11]\n{entry[0]} = {entry[1]}\n")
        (told / "METADATA").write_text("Metadata-Version: 2.1\nName: mlx-kv-harness\nVersion: 0.1.0\n")
        for source, name in ({name: name for name in WHEEL["packages"]} | WHEEL["sources"]).items():
            (site / name).symlink_to(ROOT / source)
    return site


def in_a_project(
    folder: Path, *arguments: str, tests: str = "", python: tuple[str, ...] = ("-m", "pytest"), path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """pytest in a folder with one test module, or none. ``path``: in the place of what an install makes."""
    if tests:
        (folder / "test_theirs.py").write_text(tests)
    env = os.environ | {"PYTHONPATH": str(path or installed(folder)), "COLUMNS": "200"}
    for name in ("PYTEST_ADDOPTS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        env.pop(name, None)
    command = [sys.executable, *python, "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=600, check=False)


def smoke(target: str, *more: str) -> tuple[str, ...]:
    return "--kv-target", target, "--kv-profile", "smoke", *more


def test_a_right_target_passes_in_several_processes_with_its_planted_bug(tmp_path: Path) -> None:
    done = in_a_project(tmp_path, *smoke(RIGHT, "-n", "2", "--junitxml", "junit.xml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout and not (tmp_path / "reports").exists()
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("mask_shows_exactly_the_visible_set"))
    assert row.split() == ["mask_shows_exactly_the_visible_set", "PASS"]
    assert re.search(r"^planted bug +a test$", done.stdout, re.M) and "no bug is planted" not in done.stdout
    cases = ElementTree.parse(tmp_path / "junit.xml").getroot().findall(".//testcase")
    assert {case.get("name") for case in cases} == {f"{RIGHT}[plain-rows]", f"{RIGHT}[planted bug]"}
    assert {case.get("classname") for case in cases} == {"kv-harness"}
    (told,) = (case.find("properties/property") for case in cases if case.get("name", "").endswith("[plain-rows]"))
    assert told is not None and told.get("name") == "kv_harness"
    value = json.loads(told.get("value") or "")
    report = verify(RIGHT, "smoke")
    told_by_run = {told["id"]: told["verdict"] for told in report.record["properties"]}
    assert value["target"] == RIGHT and value["programs"] == report.record["programs"] > 0
    assert value["properties"] == told_by_run
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
    assert re.search(r"^planted bug +none$", done.stdout, re.M)
    assert "mlx_lm:gpt_bigcode: no bug is planted, so nothing shows what would have been found" in done.stdout


@pytest.mark.parametrize("more", [(), ("-n", "2"), ("--kv-target", RIGHT)])
def test_a_name_can_be_given_back(tmp_path: Path, more: tuple[str, ...]) -> None:
    """As it is printed; pytest looks for no file of that name, and a test of the project stays out."""
    name = f"kv-harness::{RIGHT}[planted bug]"
    done = in_a_project(tmp_path, "--kv-profile", "smoke", "-v", *more, name, tests="def test_theirs(): assert 0\n")
    assert done.returncode == 0, done.stdout + done.stderr
    said = f"PASSED {name}" if "-n" in more else f"{name} PASSED"
    assert "1 passed" in done.stdout and said in done.stdout


@pytest.mark.parametrize("more", [(), ("-n", "2"), ("--kv-target", RIGHT)])
def test_a_name_and_a_file_of_the_project_can_be_asked_for_together(tmp_path: Path, more: tuple[str, ...]) -> None:
    name = f"kv-harness::{RIGHT}[planted bug]"
    theirs = "def test_theirs(): assert 0\n"
    both = in_a_project(tmp_path, "--kv-profile", "smoke", *more, name, "test_theirs.py", tests=theirs)
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


def test_a_policy_and_a_limit_are_those_of_kv_harness_run(tmp_path: Path) -> None:
    """On the historic bug no test is left that plants it; a replay waits as long."""
    done = in_a_project(tmp_path, *smoke(RIGHT, "--kv-policy", "offset"))
    assert done.returncode == 1 and "collected 1 item" in done.stdout
    assert "FAIL  mask_key_axis_equals_live_keys" in done.stdout and "@offset-mask" in done.stdout
    assert re.search(r"^planted bug +judged itself$", done.stdout, re.M) and "no bug is planted" not in done.stdout
    done = in_a_project(tmp_path, *smoke(ABORTS, "--kv-limit", "33"))
    assert done.returncode == 1 and "--run-command --limit 33" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--kv-target", ""),
        ("--kv-target", RIGHT, "--kv-seed", "-1"),
        ("--kv-target", RIGHT, "--kv-limit", "0"),
    ],
)
def test_what_would_verify_nothing_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = in_a_project(tmp_path, *arguments, tests="def test_theirs(): pass\n")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "ERROR: --kv-" in done.stderr + done.stdout


def test_without_the_option_nothing_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of ours but the plugin is imported, and no test is added."""
    looks = """
import os, sys

def test_theirs():
    assert not {"harness", "properties", "reference_models"} & set(sys.modules)
    assert "mlx" not in sys.modules and "MLX_DISABLE_COMPILE" not in os.environ
"""
    for name in ("MLX_DISABLE_COMPILE", "MLX_ENABLE_TF32", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    done = in_a_project(tmp_path, tests=looks)
    assert done.returncode == 0 and "1 passed" in done.stdout and "= kv-harness =" not in done.stdout


THEIRS = ("harness", "properties", "reference_models")
USES = "from {0} import mine\n\ndef test_theirs():\n    assert mine == 'theirs'\n"


def with_a_folder(project: Path, name: str) -> Path:
    (project / name).mkdir()
    (project / name / "__init__.py").write_text("mine = 'theirs'\n")
    return project / name


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("python", [("-m", "pytest"), ("-c", "import pytest; raise SystemExit(pytest.main())")])
def test_a_repository_with_a_folder_of_that_name_is_left_alone(
    tmp_path: Path, name: str, python: tuple[str, ...]
) -> None:
    """With its folder first on the path, as `python -m pytest` puts it, and by what pytest itself adds."""
    with_a_folder(tmp_path, name)
    (tmp_path / "conftest.py").write_text("")  # puts the folder on sys.path, before test modules are read
    done = in_a_project(tmp_path, "-W", "error", tests=USES.format(name), python=python)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "more"), [*((name, ()) for name in THEIRS), ("harness", ("-n", "1"))])
def test_a_folder_in_the_way_is_one_line(tmp_path: Path, name: str, more: tuple[str, ...]) -> None:
    folder = with_a_folder(tmp_path, name)
    done = in_a_project(tmp_path, *smoke(RIGHT, *more), tests="def test_theirs(): pass\n")
    errors = [line for line in (done.stderr + done.stdout).splitlines() if line.startswith("ERROR")]
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "Traceback" not in done.stdout + done.stderr
    assert len(errors) == 1 and f"{folder} is in the way of the package {name!r}" in errors[0]
    assert "-p no:kv_harness" in errors[0]
    (advice,) = re.findall(r"`python (-P -m pytest .*?)`", errors[0])
    again = in_a_project(tmp_path, "--collect-only", "-q", *smoke(RIGHT), python=tuple(advice.split()))
    assert again.returncode == 0, again.stdout + again.stderr  # what the line advises helps
    without = in_a_project(tmp_path, "-p", "no:kv_harness", *more)
    assert without.returncode == 0 and "1 passed" in without.stdout


@pytest.mark.parametrize("name", THEIRS)
def test_a_folder_that_comes_into_the_way_later_is_one_line(tmp_path: Path, name: str) -> None:
    """pytest puts the folder of a test module on the path when it reads that."""
    folder = with_a_folder(tmp_path, name)
    done = in_a_project(tmp_path, *smoke(RIGHT), tests=USES.format(name), python=("-P", "-m", "pytest"))
    (line,) = (line for line in (done.stderr + done.stdout).splitlines() if line.startswith("ERROR"))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR and "Traceback" not in done.stdout + done.stderr
    assert f"{folder} is in the way" in line


def test_a_folder_without_a_module_is_in_nobodys_way(tmp_path: Path) -> None:
    """A package comes before a folder that is none, wherever they lie."""
    (tmp_path / "harness").mkdir()
    done = in_a_project(tmp_path, "--collect-only", "-q", *smoke(RIGHT))
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_checkout_on_the_path_has_the_plugin_by_another_name(tmp_path: Path) -> None:
    """Once, also where it is installed as well."""
    for path in (ROOT, installed(tmp_path)):
        done = in_a_project(tmp_path, "-p", "harness.pytest_plugin", "--collect-only", "-q", *smoke(RIGHT), path=path)
        assert done.returncode == 0 and "2 tests collected" in done.stdout, done.stdout + done.stderr


def test_an_editable_install_has_the_plugin_too() -> None:
    """The folders that it puts on the path hold every package of the wheel."""
    folders = [ROOT / folder for folder in PROJECT["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    sources = {name: name for name in WHEEL["packages"]} | WHEEL["sources"]
    for source, name in sources.items():
        found = [folder / name for folder in folders if (folder / name / "__init__.py").is_file()]
        assert found == [ROOT / source]
    (entry,) = PROJECT["project"]["entry-points"]["pytest11"].values()
    assert entry in sources.values()
