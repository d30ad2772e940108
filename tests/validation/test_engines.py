"""Other engines under the same plan: right ones pass, planted wrong ones fail, and what never gets to a chunk behind a
trim is vacuous or refused."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness.cli import main
from harness.findings import Verdict
from harness.reporting.checkpoint import load_checkpoint_schema
from harness.validation import measuring
from harness.validation.verdict import shows
from properties import ALL, BY_ID
from tests.validation.conftest import Synth, Validate, needs_mlx_lm

VALIDATOR = jsonschema.Draft202012Validator(load_checkpoint_schema())
CAUGHT = "the offset mask policy is caught on the same plan"
MASK = "mask_key_axis_equals_live_keys"


def test_the_report_of_an_offset_mask_holds_what_replays_it(
    synth: Synth,
    validate: Validate,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The block of the Markdown, saved where nothing else lies; the checkpoint is named by where it is."""
    wrong = validate(synth("qwen2_vl"), "--after", "offset")
    assert wrong.record is not None and wrong.markdown is not None
    VALIDATOR.validate(wrong.record)
    blocks = re.findall(r"^```json\n(.*?)^```$", wrong.markdown, re.M | re.S)
    assert len(blocks) == len(wrong.record["findings"]) > 0
    assert wrong.markdown.count("The checkpoint must lie where the file says") == len(blocks)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    Path("trace.json").write_text(blocks[0])
    assert main(["replay", "trace.json"]) == 1
    assert f"{wrong.record['findings'][0]['property']} is still broken" in capsys.readouterr().out


@needs_mlx_lm
@pytest.mark.parametrize(
    ("family", "bits"), [("olmo3", None), ("olmo3", 4), ("glm4_moe_lite", None), ("nemotron_nas", None)]
)
def test_mlx_lm_passes_and_the_offset_policy_fails(
    family: str, bits: int | None, synth: Synth, validate: Validate
) -> None:
    folder = synth(family, **({} if bits is None else {"bits": bits}))
    right = validate(folder, "--engine", "mlx_lm", "--before", "library")
    assert right.record is not None and (right.code, right.record["verdict"]) == (0, "PASS"), right.out
    VALIDATOR.validate(right.record)
    assert all(row["decisive_steps"] > 0 for row in right.record["acceptance"])
    assert right.row(CAUGHT)["decisive_steps"] == 2
    greedy = right.row("greedy tokens are those of the before side, where both are decided")
    assert greedy["decisive_steps"] > 20 and greedy["result"] == "PASS"
    assert right.record["sides"] == {"after": "live", "before": "library", "control": "offset"}
    assert right.record["engine"]["name"] == "mlx_lm" and right.record["dtype"] == "float32"
    assert (right.record["checkpoint"]["quantisation"] is None) == (bits is None)
    assert "--engine mlx_lm --before library" in right.record["command"]
    assert right.markdown is not None and "the model that its own loader makes" in right.markdown
    assert right.record["limits"][0].startswith("The engine is mlx-lm")
    assert any("the same model without a cache" in said for said in right.record["limits"])
    assert not any("not that they are right" in said for said in right.record["limits"])
    assert any("outputs_equal_the_witness was not judged: the target lacks" in said for said in right.record["limits"])

    wrong = validate(folder, "--engine", "mlx_lm", "--after", "offset")
    assert wrong.record is not None and (wrong.code, wrong.record["verdict"]) == (1, "FAIL")
    VALIDATOR.validate(wrong.record)
    found = {found["property"] for found in wrong.record["findings"]}
    assert "every_operation_completes" in found and (MASK in found or family == "glm4_moe_lite")
    for each in wrong.record["findings"]:
        assert main(["replay", each["replay"].split()[-1]]) == 1


@needs_mlx_lm
def test_a_planted_bug_of_the_engine_fails_and_hidden_masks_are_vacuous(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    from harness.targets.mlx_lm_live import LiveWindow
    from reference_models.engine import masks

    def by_the_offset(self: Any, N: int, return_array: bool = False, window_size: int | None = None) -> Any:
        return masks.mask_for(N, self._cache, "offset", window_size or self._window)

    folder = synth("olmo3")
    monkeypatch.setattr(LiveWindow, "make_mask", by_the_offset)
    wrong = validate(folder, "--engine", "mlx_lm")
    assert wrong.record is not None and wrong.record["verdict"] == "FAIL" and wrong.row(MASK)["result"] == "FAIL"

    monkeypatch.setattr(LiveWindow, "make_mask", lambda self, N, **_: "causal" if N > 1 else None)
    blind = validate(folder, "--engine", "mlx_lm")
    assert blind.record is not None and blind.code == 1
    assert blind.row(CAUGHT)["result"] == "VACUOUS" and blind.record["verdict"] != "PASS"


@needs_mlx_lm
def test_what_never_gets_behind_a_trim_is_vacuous_or_refused(synth: Synth, validate: Validate) -> None:
    short = validate(synth("olmo3"), "--engine", "mlx_lm", "--tokens", "24")
    assert short.code == 1 and short.out.startswith("VACUOUS  ") and short.record is not None
    VALIDATOR.validate(short.record)
    assert (short.record["verdict"], short.record["engine"]["name"]) == ("VACUOUS", "mlx_lm")
    own = f"wire:{sys.executable} -m harness.wire.worker mlx_lm:{synth('olmo3')}"
    refused = validate(synth("olmo3"), "--engine", own)  # the library's own caches have no front trim
    assert (refused.code, refused.record) == (2, None)
    assert "no chunk would follow a trim: it lacks enforce max kv size" in refused.err.splitlines()[-1]


@needs_mlx_lm
def test_an_engine_in_another_process(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    folder = synth("olmo3")
    command = f"wire:{sys.executable} -m harness.wire.worker mlx_lm:{folder}@live-window"
    right = validate(folder, "--engine", command)
    assert right.record is not None and (right.code, right.record["verdict"]) == (0, "PASS"), right.out
    VALIDATOR.validate(right.record)
    assert "its own word" in right.record["limits"][0] and right.row(CAUGHT)["decisive_steps"] == 2
    wrong = validate(folder, "--engine", command, "--after", "offset")
    assert wrong.record is not None and wrong.record["verdict"] == "FAIL"
    replay = wrong.record["findings"][0]["replay"].split()
    assert replay[-1] == "--run-command" and main(["replay", *replay[2:]]) == 1


WEIGHTS = "the weights are those of the checkpoint: greedy tokens of the untrimmed prompt, read by another engine"
SHOWS = "the engine shows masks and positions, or its logits are compared"


@needs_mlx_lm
def test_an_engine_with_other_weights_fails_however_right_its_masks_are(synth: Synth, validate: Validate) -> None:
    folder, other = synth("olmo3"), synth("olmo3", seed=5)
    command = f"wire:{sys.executable} -m harness.wire.worker mlx_lm:{other}@live-window"
    wrong = validate(folder, "--engine", command)
    assert wrong.record is not None and wrong.record["verdict"] == "FAIL", wrong.out
    assert wrong.row(WEIGHTS)["result"] == "FAIL" and wrong.row(SHOWS)["result"] == "PASS"
    right = validate(folder, "--engine", f"wire:{sys.executable} -m harness.wire.worker mlx_lm:{folder}@live-window")
    assert right.record is not None and right.record["verdict"] == "PASS", right.out
    assert right.row(WEIGHTS)["decisive_steps"] > 20


def test_an_engine_that_shows_nothing_proves_nothing() -> None:
    blind = [prop for prop in ALL if not prop.needs]
    assert blind and shows(blind).result is Verdict.VACUOUS
    masks, positions = BY_ID["mask_key_axis_equals_live_keys"], BY_ID["positions_are_absolute"]
    assert shows([*blind, masks]).result is shows([*blind, positions]).result is Verdict.VACUOUS
    assert shows([masks, positions]).result is Verdict.PASS
    assert shows([*blind, BY_ID["outputs_equal_the_cache_free_forward"]]).result is Verdict.PASS


@needs_mlx_lm
def test_a_process_that_serves_other_weights_since_does_not_go_on(
    synth: Synth, validate: Validate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that names a link, which led to another checkpoint when the first half was measured."""
    folder, link = synth("olmo3"), tmp_path / "served"
    link.symlink_to(synth("olmo3", seed=5))
    command = f"wire:{sys.executable} -m harness.wire.worker mlx_lm:{link}@live-window"
    whole = measuring.measure
    calls = []

    def stops(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return whole(*given)

    monkeypatch.setattr("harness.validation.run.measure", stops)
    assert validate(folder, "--engine", command).record is None and len(calls) == 3
    monkeypatch.setattr("harness.validation.run.measure", whole)
    link.unlink()
    link.symlink_to(folder)
    right = validate(folder, "--engine", command)
    assert "does not answer as it did" in right.err + right.out
    assert right.record is not None and right.record["verdict"] == "PASS", right.out


def test_a_worker_that_serves_something_else_is_refused(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    toy = f"wire:{sys.executable} -m harness.wire.examples.toy"
    other = validate(synth("olmo3"), "--engine", toy)
    assert (other.code, other.record) == (2, None)
    assert "serves another model: its vocabulary has 17 tokens" in other.err and other.err.count("\n") == 1
    folder = tmp_path / "seventeen"
    shutil.copytree(synth("olmo3"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 17}))
    unable = validate(folder, "--engine", toy)
    assert (unable.code, unable.record) == (2, None) and "it lacks enforce max kv size" in unable.err
    assert not list((tmp_path / "reports" / "checkpoints").glob("*")), "half a run was left"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--engine", "mlx_vlm"),
            "reads no checkpoint here (its models have random weights, and its caches no front trim); there are",
        ),
        (("--engine", "llama.cpp"), "is no engine; there are reference, mlx_lm or wire:COMMAND"),
        (("--engine", "wire: "), "is no engine"),
        (("--engine", "wire:true"), "the engine exited with code 0"),
        (("--engine", "mlx_lm", "--dtype", "float16"), "argument --dtype: mlx_lm is judged in float32 alone"),
        (("--engine", "wire:true", "--dtype", "float16"), "argument --dtype"),
        (("--before", "library"), "argument --before: this engine has live, offset, not library"),
    ],
)
def test_what_no_engine_can_do_gets_one_line(
    options: tuple[str, ...], words: str, synth: Synth, validate: Validate
) -> None:
    seen = validate(synth("olmo3"), *options)
    assert (seen.code, seen.record) == (2, None)
    assert words in seen.err and seen.err.count("\n") == 1


@pytest.mark.parametrize("engine", ["mlx_lm", "wire:true"])
def test_a_config_that_claims_packed_weights_is_refused_for_every_engine(
    engine: str, synth: Synth, validate: Validate, tmp_path: Path
) -> None:
    for number, (bits, said, words) in enumerate(
        (
            (None, {"bits": 4, "group_size": 32}, "says that the weights are quantised, but none of them is"),
            (4, {"bits": 8, "group_size": 32}, "is not packed with 8 bits in groups of 32"),
            (4, None, "belongs to a packed weight, but config.json has no quantization"),
        )
    ):
        folder = tmp_path / f"claims-{number}"
        shutil.copytree(synth("olmo3", **({} if bits is None else {"bits": bits})), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization": said, "quantization_config": said}))
        seen = validate(folder, "--engine", engine)
        assert (seen.code, seen.record) == (2, None)
        assert words in seen.err and seen.err.count("\n") == 1
