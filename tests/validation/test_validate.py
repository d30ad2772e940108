"""Synthetic checkpoints through the whole command: right ones pass, the historic bug fails, half a one is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import mlx.core as mx
import pytest

from harness.cli import main
from harness.reporting.checkpoint import checkpoint_markdown, load_checkpoint_schema
from harness.validation.plan import Asked
from harness.validation.record import Validation
from tests.validation.conftest import Synth, Validate

FAMILIES = ("mistral4", "nemotron_nas", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
VALIDATOR = jsonschema.Draft202012Validator(load_checkpoint_schema())
KINDS = {"float32": {}, "float16": {"dtype": "float16"}, "4-bit": {"bits": 4}}
COMPARED = "outputs_equal_the_witness"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_live_policy_passes_and_the_offset_policy_fails(
    family: str, kind: str, synth: Synth, validate: Validate
) -> None:
    folder = synth(family, **KINDS[kind])
    experts = family in ("mistral4", "qwen3_vl_moe") and kind == "float16"
    wide = ("--dtype", "float32") if experts else ()  # MLX has no half-precision experts on a CPU
    if experts:
        refused = validate(folder)
        assert refused.code == 2 and "--dtype float32" in refused.err and refused.record is None
    right = validate(folder, *wide)
    assert (right.code, right.record and right.record["verdict"]) == (0, "PASS"), right.out
    assert right.record is not None and not right.record["findings"]
    assert all(row["decisive_steps"] > 0 for row in right.record["acceptance"])
    VALIDATOR.validate(right.record)
    assert right.markdown == checkpoint_markdown(right.record)
    criteria = [row["criterion"] for row in right.record["acceptance"]]
    assert (COMPARED in criteria) == (kind == "float32" or experts)
    assert any(COMPARED in limit for limit in right.record["limits"]) == (COMPARED not in criteria)
    sees = family.startswith("qwen")
    assert [planned["name"] for planned in right.record["plan"]["programs"]][3:] == ["images"] * sees

    wrong = validate(folder, *wide, "--after", "offset")
    assert (wrong.code, wrong.record and wrong.record["verdict"]) == (1, "FAIL")
    assert wrong.record is not None
    VALIDATOR.validate(wrong.record)
    assert {"mask_key_axis_equals_live_keys", "every_operation_completes"} <= {
        found["property"] for found in wrong.record["findings"]
    }
    (crash,) = [crash for crash in wrong.record["crashes"] if crash["program"] == "bounded"]
    assert crash["mask_shape"] == [8, 32] and crash["score_shape"][-2:] == [8, 24]
    for record, side in ((right.record, "control"), (wrong.record, "after")):
        stopped = [limit for limit in record["limits"] if f" stopped on the {side} side in forward " in limit]
        names = [planned["name"] for planned in record["plan"]["programs"]]
        assert [limit.split()[0] for limit in stopped] == names[1:]  # all but the untrimmed one
        assert "in forward 4 of 8 (operation 7 of 17, Chunk(8)): ValueError: [broadcast" in stopped[0]


def test_a_finding_can_be_replayed(
    synth: Synth, validate: Validate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = synth("qwen2_vl")
    wrong = validate(folder, "--after", "offset")
    assert wrong.record is not None
    for found in wrong.record["findings"]:
        file = found["replay"].split()[-1]
        assert main(["replay", file]) == 1
        assert f"{found['property']} is still broken" in capsys.readouterr().out
    trace = json.loads(Path(file).read_text())
    other = tmp_path / "other"
    assert main(["synth", "qwen2_vl", str(other), "--seed", "1"]) == 0
    trace["target"]["variant"] = trace["target"]["variant"].replace(str(folder), str(other))
    edited = _refingerprinted(trace, tmp_path / "edited.json")
    assert main(["replay", str(edited)]) == 2
    assert "is another checkpoint now" in capsys.readouterr().err


def test_half_precision_that_is_mended_is_fixed(
    synth: Synth, validate: Validate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A replay asks all properties in the end: those that have no tolerance for such weights would cry wolf."""
    wrong = validate(synth("qwen2_vl", dtype="float16"), "--after", "offset")
    assert wrong.record is not None
    files = {found["replay"].split()[-1] for found in wrong.record["findings"]}
    for number, file in enumerate(sorted(files)):
        trace = json.loads(Path(file).read_text())
        trace["target"]["policy"] = "live"
        assert main(["replay", str(_refingerprinted(trace, tmp_path / f"{number}.json"))]) == 0
    assert capsys.readouterr().out.count("FIXED") == len(files) > 1


def _refingerprinted(trace: dict[str, object], path: Path) -> Path:
    from harness.operations import Program
    from harness.trace import Trace

    target, finding, steps, versions = (trace[name] for name in ("target", "finding", "steps", "versions"))
    made = Trace(target, Program.from_json(trace["program"]), finding, tuple(steps), versions)  # type: ignore[arg-type]
    path.write_text(made.to_text())
    return path


def test_before_and_after(synth: Synth, validate: Validate) -> None:
    seen = validate(synth("qwen3_vl"), "--before", "offset")
    assert seen.code == 0 and seen.record is not None
    VALIDATOR.validate(seen.record)
    assert seen.record["sides"] == {"after": "live", "before": "offset"}  # which is the control as well
    assert {(crash["side"], crash["program"]) for crash in seen.record["crashes"]} == {
        ("before", "bounded"),
        ("before", "sinks_and_rollback"),
        ("before", "images"),
    }
    greedy = seen.row("greedy tokens are those of the before side, where both are decided")
    assert greedy["result"] == "PASS" and greedy["decisive_steps"] > 20 and "0.05 deviations" in greedy["evidence"]
    assert seen.row("untrimmed logits are those of the before side, byte for byte")["decisive_steps"] == 7
    assert seen.markdown is not None and "(8, 32)" in seen.markdown


def test_the_seed_decides_all_but_the_time(synth: Synth, validate: Validate) -> None:
    first, again, other = (validate(synth("nemotron_nas"), "--seed", seed).record for seed in ("3", "3", "4"))
    assert first is not None and again is not None and other is not None
    assert first | {"written": None} == again | {"written": None}
    assert first["plan"]["programs"] != other["plan"]["programs"]


def test_the_defaults_are_decisive_for_every_property_that_is_claimed(synth: Synth, validate: Validate) -> None:
    defaults = ("--max-kv-size", "128", "--prefill-chunk-size", "64", "--tokens", "512", "--decode", "8")
    seen = validate(synth("nemotron_nas"), *defaults)
    assert seen.code == 0 and seen.record is not None
    assert seen.row("memory_is_given_back")["decisive_steps"] > 0
    expected = f"kv-harness validate {synth('nemotron_nas')} {' '.join(defaults)} --after live --seed 0"
    assert seen.record["command"] == expected


def test_every_set_up_has_a_report_of_its_own(
    synth: Synth, validate: Validate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The newer of two with other numbers would take the older one's place, and nobody would know what was judged."""
    folder, seen = synth("nemotron_nas"), {}
    others = ([], ["--max-kv-size", "12"], ["--prefill-chunk-size", "4"], ["--tokens", "32"], ["--decode", "1"])
    more = (["--dtype", "float16"], ["--before", "offset"], ["--after", "offset"], ["--seed", "1"])
    for options in (*others, *more):
        said = validate(folder, *options).out
        report = said.splitlines()[-1].removeprefix("report in ")
        assert report not in seen, f"{options} and {seen[report]}"
        seen[report] = options
        if not options:
            assert Path(report).name.endswith("-P16-C8-N40-K2.md")
    assert main(["report", "--out", str(tmp_path / "reports")]) == 0
    index = (tmp_path / "reports" / "index.md").read_text()
    rows = [line.rsplit("|", 2)[0] for line in index.splitlines() if line.startswith("| checkpoint ")][1:]
    assert len(set(rows)) == len(seen), "rows of the index that say the same"
    again = validate(folder)
    assert again.out.splitlines()[-1].removeprefix("report in ") in seen


def test_bfloat16_and_a_report_that_is_older(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Most published weights are bfloat16. A run that does not get to its end leaves no report of an earlier one."""
    folder = synth("nemotron_nas", dtype="bfloat16")
    right = validate(folder)
    assert (right.code, right.record is not None) == (0, True)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.validation.run.measure", killed)
    stopped = validate(folder)
    assert (stopped.code, stopped.record) == (1, None)
    assert not list(tmp_path.glob("reports/checkpoints/*.json"))


def test_a_side_is_not_compared_with_itself(synth: Synth, validate: Validate) -> None:
    same = validate(synth("nemotron_nas"), "--before", "live")
    assert same.code == 2 and "compares a side with itself" in same.err


@pytest.mark.parametrize("options", [(), ("--tokens", "24")], ids=["run", "by plan"])
def test_a_name_cannot_look_like_a_verdict(
    options: tuple[str, ...], synth: Synth, validate: Validate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine\nPASS  yours\r\x1b[2K"
    shutil.copytree(synth("nemotron_nas"), folder)
    seen = validate(folder, *options)
    verdict = "VACUOUS" if options else "PASS"
    said = seen.out.splitlines()
    assert said[-2].startswith(f"{verdict}  mine\\nPASS  yours\\r\\x1b[2K: ")
    assert seen.record is not None and said[-1].startswith("report in ")
    assert len(said) == (2 if options else 2 + len(seen.record["acceptance"]))
    assert all(line.startswith("validate: ") for line in seen.err.splitlines()) and "\x1b" not in seen.out + seen.err
    assert main(["identify", str(folder)]) == 0
    assert "mine\\nPASS  yours" in capsys.readouterr().out


def test_weights_of_zeros_are_vacuous(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    folder = tmp_path / "zeros"
    shutil.copytree(synth("nemotron_nas"), folder)
    for file in folder.glob("*.safetensors"):
        arrays = mx.load(str(file))
        assert isinstance(arrays, dict)
        mx.save_safetensors(str(file), {name: mx.zeros_like(array) for name, array in arrays.items()})
    empty = validate(folder)
    assert empty.record is not None and (empty.code, empty.record["verdict"]) == (1, "VACUOUS")
    assert empty.row("logits depend on the keys: behind a trim they are not those of the untrimmed prompt")


def test_truncated_weights_are_refused_in_one_line(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    assert main(["synth", "qwen2_vl", str(folder)]) == 0
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    seen = validate(folder)
    assert seen.code == 2 and seen.record is None
    assert seen.err.startswith("kv-harness: error: ") and seen.err.count("\n") == 1 and "model.safetensors" in seen.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "0.0001"), "0.0001 GB is --memory"),
        (("--memory", "-1"), "argument --memory"),
        (("--seed", "-1"), "argument --seed"),
        (("--tokens", "0"), "argument --tokens"),
        (("--tokens", "9000"), "argument --tokens"),
    ],
)
def test_what_cannot_be_used_gets_one_line(
    options: tuple[str, ...], words: str, synth: Synth, validate: Validate
) -> None:
    seen = validate(synth("qwen2_vl"), *options)
    assert (seen.code, seen.record) == (2, None)
    assert words in seen.err and seen.err.count("\n") == 1


def test_a_folder_where_a_report_would_go_is_no_crash(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    seen = validate(synth("nemotron_nas"))
    assert seen.record is not None
    (report,) = (tmp_path / "reports" / "checkpoints").glob("*.md")
    report.unlink()
    report.mkdir()
    assert validate(synth("nemotron_nas")).code == 2


@pytest.mark.parametrize(
    ("asked", "sides", "name"),
    [
        (Asked(), {"after": "live", "control": "offset"}, "x-01234567"),
        (Asked(1024, 512, 2048), {"after": "live", "before": "offset"}, "x-01234567-P1024-C512-N2048-before-offset"),
        (Asked(decode=4, seed=7), {"after": "offset"}, "x-01234567-K4-seed7-after-offset"),
    ],
)
def test_a_report_is_named_by_what_is_not_as_usual(asked: Asked, sides: dict[str, str], name: str) -> None:
    engine: Any = SimpleNamespace(title="x", digests=SimpleNamespace(digest="0123456789"), label="", dtype=None)
    plan: Any = SimpleNamespace(asked=asked)
    assert Validation(engine, plan, sides, Path("o"), "", 0).stem == Path("o") / "checkpoints" / name


PUBLISHED = Path(__file__).parents[2] / "reports" / "published" / "checkpoints"


@pytest.mark.parametrize("path", sorted(PUBLISHED.glob("*.json")), ids=lambda path: path.stem)
def test_a_committed_validation_is_what_its_record_says(path: Path) -> None:
    record = json.loads(path.read_text())
    jsonschema.Draft202012Validator(load_checkpoint_schema()).validate(record)
    assert checkpoint_markdown(record) == path.with_suffix(".md").read_text()
    assert record["verdict"] == "PASS" and record["crashes"] and record["crashes"][0]["side"] == "before"


def test_every_first_family_has_one() -> None:
    families = {json.loads(path.read_text())["checkpoint"]["family"] for path in PUBLISHED.glob("*.json")}
    assert families == {"mistral4", "nemotron_nas", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"}
