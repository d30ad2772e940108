"""Reports of validations have shrunk findings: the same ones in every run, also in one that was killed and went on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.cli import main
from harness.reporting.checkpoint import checkpoint_markdown, load_checkpoint_schema
from harness.validation import shrinking
from tests.validation.conftest import Synth, Validate

VALIDATOR = jsonschema.Draft202012Validator(load_checkpoint_schema())
SHORTEST = "Prefill(1) ; TrimFront(1) ; Chunk(2)"


def test_findings_are_shrunk_and_say_from_what(
    synth: Synth, validate: Validate, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = validate(synth("qwen2_vl"), "--after", "offset")
    assert seen.code == 1 and seen.record is not None and seen.markdown is not None
    VALIDATOR.validate(seen.record)
    programs = {planned["name"]: planned["program_text"] for planned in seen.record["plan"]["programs"]}
    assert {found["program"] for found in seen.record["findings"]} == {"bounded", "sinks_and_rollback", "images"}
    for found in seen.record["findings"]:
        assert found["program_text"] == SHORTEST, found
        assert programs[found["program"]].startswith(found["original"]["program_text"])
        assert found["original"]["message"] in seen.markdown and found["original"]["program_text"] in seen.markdown
        for replay, program in ((found["replay"], SHORTEST), (found["original"]["replay"], "Prefill(")):
            assert main(["replay", replay.split()[-1]]) == 1
            said = capsys.readouterr().out
            assert f"{found['property']} is still broken" in said and f"program   {program}" in said
        trace = tmp_path / "trace.json"
        trace.write_text(json.dumps(found["trace"]))
        assert main(["replay", str(trace)]) == 1
        assert found["message"] in capsys.readouterr().out
    row = seen.row("mask_key_axis_equals_live_keys")
    assert "the mask has 32 keys, attention received 24" in row["evidence"]  # of the plan's own program
    assert checkpoint_markdown(seen.record) == seen.markdown
    older = [{name: value for name, value in each.items() if name != "original"} for each in seen.record["findings"]]
    VALIDATOR.validate(seen.record | {"findings": older})
    assert "shrunk from" in seen.markdown
    assert "shrunk from" not in checkpoint_markdown(seen.record | {"findings": older})


def test_two_runs_write_the_same_and_so_does_one_that_went_on(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, options = synth("nemotron_nas"), ("--after", "offset", "--seed", "5")
    first, again = (validate(folder, *options).record for _ in range(2))
    assert first is not None and again is not None and len(first["findings"]) >= 4
    assert first | {"written": None} == again | {"written": None}

    shrunk: list[Any] = []
    right = shrinking._shrunk

    def killed(*arguments: Any) -> Any:
        if len(shrunk) == 2:
            raise KeyboardInterrupt
        shrunk.append(arguments)
        return right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(shrinking, "_shrunk", killed)
        stopped = validate(folder, *options)
    assert (stopped.code, stopped.record) == (1, None)
    resumed = validate(folder, *options)
    assert resumed.record is not None and resumed.record | {"written": None} == first | {"written": None}
    assert "goes on behind" in resumed.err and "after/bounded: " not in resumed.err.split("goes on behind")[1]
    assert resumed.err.count("shrinking after/") == len(first["findings"]) - 2


def test_a_right_checkpoint_has_nothing_to_shrink(synth: Synth, validate: Validate) -> None:
    seen = validate(synth("nemotron_nas"))
    assert seen.code == 0 and "shrinking" not in seen.err
