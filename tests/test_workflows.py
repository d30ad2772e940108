"""The workflows: what their steps run exists, with these options. Nobody sees it at night that it does not."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from harness.cli import build_parser
from harness.commands import UsageError
from harness.reporting.shards import Shard, shard_of
from tests.needed import needed

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
#: What a step may call beside make and kv-harness.
SHELL: tuple[str, ...] = ("python -m pip install", "gh issue", "cat", "mkdir", "printf", "[", "merge=()", "number=$(")
SHELL += ("for", "done", "if", "else", "fi")
Steps = list[tuple[str, dict[str, Any], dict[str, str]]]


def workflows() -> Iterator[tuple[str, dict[str, Any]]]:
    yaml = needed("yaml")
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        yield path.name, yaml.safe_load(path.read_text(encoding="utf-8"))


def steps() -> Steps:
    """Every step that runs something, by its place, with the environment that it has beside the runner's own; of a job
    that is listed several times, each of them."""
    found = []
    for name, workflow in workflows():
        for job, data in workflow["jobs"].items():
            for number, step in enumerate(data["steps"]):
                env = {**workflow.get("env", {}), **data.get("env", {}), **step.get("env", {})}
                for listed in data.get("strategy", {}).get("matrix", {}).get("include", [{}]) if "run" in step else ():
                    run = step["run"]
                    for key, value in listed.items():
                        run = run.replace(f"${{{{ matrix.{key} }}}}", str(value))
                    place = f"{name}, {listed.get('what', job)}, step {number}"
                    found.append((place, {**step, "run": run}, {key: str(env[key]) for key in env}))
    return found


def wrong(script: str, env: dict[str, str]) -> list[str]:
    """What of a step's script does not exist: targets and variables of make, commands and options of kv-harness, and
    what is neither nor of the shell."""
    found = []
    for line in script.splitlines():
        line = line.strip().removeprefix("'")
        if line.startswith("make "):
            found += [*_unset(line, env), *_wrong_make(line.split(" | ")[0])]
        elif line.startswith("kv-harness "):
            found += _wrong_command(line, env)
        elif line and not any(line.startswith(known) for known in SHELL):
            found.append(f"neither make nor kv-harness nor of the shell: {line}")
    return found


def _unset(line: str, env: dict[str, str]) -> Iterator[str]:
    for name in re.findall(r"\$(\w+)", line):
        if name not in env and name != "RUNNER_TEMP":
            yield f"nothing sets ${name}"


def _wrong_make(line: str) -> Iterator[str]:
    targets = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert targets is not None
    for word in shlex.split(line)[1:]:
        name, equals, _ = word.partition("=")
        if equals and not re.search(rf"^{name} \?=", MAKEFILE, re.MULTILINE):
            yield f"make has no variable {name}"
        elif not equals and word not in targets[1].split():
            yield f"make has no target {word}"


def _wrong_command(line: str, env: dict[str, str]) -> Iterator[str]:
    values = {"SEED": "7", "SHARD": "1", "RUNNER_TEMP": "/tmp"} | {k: v for k, v in env.items() if "${{" not in v}
    text = line.replace('"${merge[@]}"', "--merge shards/1")
    yield from _unset(text, env)
    text = re.sub(r"\$(\w+)", lambda found: values.get(found[1], "?"), text)
    try:
        arguments = build_parser().parse_args(shlex.split(text)[1:])
        shard_of(getattr(arguments, "shard", None) or "1/1")
    except (UsageError, ValueError, SystemExit) as error:
        yield f"{line}: {error}"


def test_what_is_run_exists() -> None:
    found = steps()
    assert len(found) > 10
    assert {place: said for place, step, env in found if (said := wrong(step["run"], env))} == {}


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("make lintt", "make has no target lintt"),
        ("make parity EXAMPLE=3", "make has no variable EXAMPLE"),
        ("kv-harness runn", "invalid choice"),
        ("kv-harness run --shards 1/2", "unrecognized arguments"),
        ('kv-harness run --shard "9/$SHARDS"', "must be I/N"),
        ("kv-harness run --profile nightlyy", "invalid choice"),
        ('kv-harness run --seed "$SEEDD"', "nothing sets $SEEDD"),
        ("kv_harness run", "neither make nor kv-harness"),
        ('make engines PART="$PARTT/4"', "nothing sets $PARTT"),
    ],
)
def test_what_does_not_exist_is_told(script: str, words: str) -> None:
    assert any(words in said for said in wrong(script, {"SHARDS": "8", "SEED": "${{ 1 }}"}))


def test_scripts_are_of_the_shell() -> None:
    for place, step, _ in steps():
        said = subprocess.run(["bash", "-n"], input=step["run"], capture_output=True, text=True, check=False)
        assert said.returncode == 0, f"{place}: {said.stderr}"


def test_the_shards_of_the_night_are_all_there() -> None:
    night = dict(workflows())["nightly.yml"]
    of = int(night["env"]["SHARDS"])
    assert night["jobs"]["verify"]["strategy"]["matrix"]["shard"] == list(range(1, of + 1))
    assert sorted(n for i in range(1, of + 1) for n in Shard(i, of).of_these(29)) == list(range(29))
    (run,) = (step["run"] for step in night["jobs"]["verify"]["steps"] if step.get("name") == "Run")
    assert '--shard "$SHARD/$SHARDS"' in run and '--seed "$SEED"' in run and "--families" not in run


def test_the_parts_of_the_night_are_all_there() -> None:
    night = dict(workflows())["nightly.yml"]
    of, job = int(night["env"]["PARTS"]), night["jobs"]["engines"]
    assert job["strategy"]["matrix"]["part"] == list(range(1, of + 1))
    (run,) = (step["run"] for step in job["steps"] if step.get("name") == "Run")
    assert run.startswith("make engines ") and 'PART="$PART/$PARTS"' in run and 'SEED="$SEED"' in run
    (upload,) = (step["with"] for step in job["steps"] if "upload-artifact" in step.get("uses", ""))
    (download,) = (s["with"] for s in night["jobs"]["index"]["steps"] if "download-artifact" in s.get("uses", ""))
    assert fnmatch(upload["name"], download["pattern"]) and "engines" in night["jobs"]["index"]["needs"]


def recipe(target: str, **values: str) -> list[str]:
    """What a target of one line runs here, with these variables and otherwise its own defaults."""
    (line,) = MAKEFILE.split(f"\n{target}: ", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    defaults = dict(re.findall(r"^(\w+) \?= (.*)$", MAKEFILE, re.MULTILINE))
    line = re.sub(r"\$\((\w+)\)", lambda found: {**defaults, "BIN": "", **values}[found[1]], line.strip())
    program, *arguments = shlex.split(line)
    assert program == "/kv-harness"
    return arguments


def test_a_night_of_mlx_lm_has_reports_and_an_issue_of_its_news_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One model type, of which a bug is recorded, and one that has no keys."""
    needed("mlx_lm")
    from harness import known, runner
    from harness.cli import main
    from harness.targets import mlx_lm
    from harness.targets.mlx_lm_models import version

    names = [name.partition(":")[2] for name in mlx_lm.names()]
    monkeypatch.setattr(mlx_lm, "names", lambda: ("mlx_lm:mamba2", "mlx_lm:afmoe", "mlx_lm:llama"))
    monkeypatch.chdir(tmp_path)
    made = {"afmoe", "mamba2", "llama"} <= set(names)
    assert made and len(set(names)) == len(names) > 100
    small = {"PROFILE": "smoke", "JOBS": "1"}
    codes = [main(recipe("engines", PART=part, **small)) for part in ("1/2", "2/2")]
    out = capsys.readouterr().out
    assert codes == [0, 0] and "mlx_lm:mamba2: not judged: " in out
    folder = tmp_path / "reports"
    records = {path.stem: json.loads(path.read_text()) for path in (folder / "targets").glob("*.json")}
    assert {name: record["verdict"] for name, record in records.items()} == {
        "mlx_lm-llama": "PASS",
        "mlx_lm-afmoe": "KNOWN",
    }, version()
    assert len((folder / "history.jsonl").read_text().splitlines()) == 2
    report = ["report", "--out", "all", "--merge", "reports", "--issue", "issue.md"]
    assert main(report) == 0 and (tmp_path / "issue.md").read_text() == ""
    monkeypatch.setattr(runner, "known_of", lambda bug: None)  # nothing is recorded of it
    assert known.known_of is not runner.known_of
    assert main(recipe("engines", PART="2/2", **small)) == 1
    assert main(report) == 0
    text = (tmp_path / "issue.md").read_text()
    assert "`mlx_lm:afmoe`: FAIL" in text and "mask_shows_exactly_the_visible_set" in text and "llama" not in text


def test_the_table_of_live_safety_is_left_for_the_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("mlx_lm")
    from harness.cli import main
    from harness.commands import live_safety

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(live_safety, "all_families", lambda: ("mamba2", "llama4"))
    assert main(recipe("live-safety", JOBS="1")) == 0
    (listed,) = (
        each
        for each in dict(workflows())["nightly.yml"]["jobs"]["long"]["strategy"]["matrix"]["include"]
        if each["what"] == "live safety"
    )
    assert listed["run"] == "make live-safety"
    assert sorted(path.name for path in tmp_path.glob(listed["reports"])) == ["live-safety.json", "live-safety.md"]


def test_what_takes_hours_is_there_every_night() -> None:
    runs = [step["run"] for place, step, _ in steps() if place.startswith("nightly.yml")]
    for wanted in ("no-false-alarm PROGRAMS=200000", "faults PROFILE=ci", "museum", "live-safety"):
        assert any(run.startswith(f"make {wanted} ") and 'SEED="$SEED"' in run for run in runs), wanted


def test_the_leg_on_metal_learns_nothing_without_its_device() -> None:
    metal = dict(workflows())["nightly.yml"]["jobs"]["metal"]
    runs = [step["run"] for step in metal["steps"] if "run" in step]
    assert metal["runs-on"].startswith("macos-")
    doctor, run = (next(text for text in runs if f"kv-harness {name}" in text) for name in ("doctor", "run"))
    assert "--device gpu" in doctor and "--device gpu" in run and runs.index(doctor) < runs.index(run)


def test_committed_validations_compute_as_stored_where_a_cpu_can() -> None:
    """Only experts do not run there in float16."""
    from reference_models.registry import config_class

    recipe = MAKEFILE.split("\npublish-checkpoints:", 1)[1].split("\n\n", 1)[0]
    families = re.search(r"for family in (.*?);", recipe)
    case = re.search(r"case .*? esac", recipe)
    experts = re.search(r"^EXPERTS := (.*)$", MAKEFILE, re.MULTILINE)
    assert families is not None and case is not None and experts is not None
    choose = case[0].replace("$(EXPERTS)", experts[1]).replace("$$", "$")
    for family in families[1].split():
        shell = ["bash", "-c", f'family={family}; {choose}; printf "%s" "$dtype"']
        said = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
        has_experts = any("experts" in name for name in config_class(family).__dataclass_fields__)
        assert said == ("--dtype float32" if has_experts else ""), family
