"""A before side on another engine: two that agree pass, a planted difference fails, noise is no finding, and what
cannot be compared is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest

from harness.checkpoints.memory import Footprint
from harness.cli import main
from harness.reporting.checkpoint import checkpoint_markdown, load_checkpoint_schema
from harness.target import ForwardObservation
from harness.targets import reference
from harness.targets.mlx_lm_checkpoints import load
from harness.targets.reference_session import ReferenceSession
from harness.validation import measuring
from harness.validation.engine_elsewhere import WireEngine
from harness.validation.engines import open_judged, open_other
from harness.validation.plan import Asked, make_plan
from harness.validation.record import Validation
from harness.validation.run import estimate
from harness.validation.sides import sides_of
from tests.validation.conftest import Synth, Validate, needs_mlx_lm

VALIDATOR = jsonschema.Draft202012Validator(load_checkpoint_schema())
CAUGHT = "the offset mask policy is caught on the same plan"
BYTES = "untrimmed logits are those of the before side, byte for byte"
GREEDY = "greedy tokens are those of the before side, where both are decided"
REPEATS = "the before side repeats itself: same_program_same_bytes"
TOY = f"wire:{sys.executable} -m harness.wire.examples.toy"


def _served(folder: Path) -> str:
    return f"wire:{sys.executable} -m harness.wire.worker mlx_lm:{folder}@live-window"


def _criteria(record: dict[str, Any]) -> set[str]:
    return {row["criterion"] for row in record["acceptance"]}


@needs_mlx_lm
def test_two_engines_that_agree_pass_and_the_report_says_which(
    synth: Synth, validate: Validate, tmp_path: Path
) -> None:
    seen = validate(synth("olmo3"), "--before", "mlx_lm", "--after", "reference")
    assert seen.record is not None and (seen.code, seen.record["verdict"]) == (0, "PASS"), seen.out
    VALIDATOR.validate(seen.record)
    assert seen.record["sides"] == {"after": "live", "before": "live", "control": "offset"}
    assert seen.record["engine"]["name"] == "reference"
    other = seen.record["before_engine"]
    assert (other["name"], other["dtype"]) == ("mlx_lm", "float32") and other["phrase"].startswith("mlx-lm 0.")
    assert BYTES not in _criteria(seen.record)
    assert seen.row(GREEDY)["decisive_steps"] > 100 and seen.row(REPEATS)["decisive_steps"] > 0
    assert f"on another engine ({other['phrase']}): logits were not compared byte" in seen.record["limits"][1]
    assert seen.record["command"].endswith("--before mlx_lm@live --after live --seed 0")
    assert seen.markdown is not None and seen.markdown == checkpoint_markdown(seen.record)
    for name, told in (("after", seen.record["engine"]), ("before", other)):
        assert any(f"engine {name}" in line and told["phrase"] in line for line in seen.markdown.splitlines())
    (file,) = (tmp_path / "reports" / "checkpoints").glob("*.json")
    assert file.stem.endswith("-P16-C8-N40-K2-before-mlx_lm-live")
    assert main(["report", "--out", str(tmp_path / "reports")]) == 0
    assert "after live, before mlx_lm live" in (tmp_path / "reports" / "index.md").read_text()
    again = validate(synth("olmo3"), *seen.record["command"].split()[11:])  # what it says does the same
    assert again.record is not None and again.record | {"written": None} == seen.record | {"written": None}


@needs_mlx_lm
def test_what_the_library_s_own_caches_cannot_run_is_left_out(synth: Synth, validate: Validate) -> None:
    seen = validate(synth("qwen2_vl"), "--before", "mlx_lm@library")
    assert seen.record is not None and (seen.code, seen.record["verdict"]) == (0, "PASS"), seen.out
    VALIDATOR.validate(seen.record)
    assert seen.record["before_engine"]["phrase"].endswith("on its own caches")
    not_run = [said.split()[0] for said in seen.record["limits"] if "was not run on the before side" in said]
    assert not_run == ["bounded", "sinks_and_rollback", "images"]
    with_trim = validate(synth("qwen2_vl"), "--before", "mlx_lm")
    assert with_trim.record is not None
    not_run = [said.split()[0] for said in with_trim.record["limits"] if "was not run on the before side" in said]
    assert not_run == ["images"]


@needs_mlx_lm
def test_the_planted_bug_of_the_other_engine_is_shown_and_not_judged(synth: Synth, validate: Validate) -> None:
    """Nor is it the control: that has to be of the engine that is judged."""
    seen = validate(synth("olmo3"), "--before", "reference@offset", "--after", "mlx_lm")
    assert seen.record is not None and (seen.code, seen.record["verdict"]) == (0, "PASS"), seen.out
    VALIDATOR.validate(seen.record)
    assert seen.record["sides"] == {"after": "live", "before": "offset", "control": "offset"}
    crashes = {crash["program"] for crash in seen.record["crashes"] if crash["side"] == "before"}
    assert crashes == {"bounded", "sinks_and_rollback"}
    assert not seen.record["findings"] and seen.row(CAUGHT)["decisive_steps"] == 2

    wrong = validate(synth("olmo3"), "--before", "reference", "--after", "mlx_lm@offset")
    assert wrong.record is not None and (wrong.code, wrong.record["verdict"]) == (1, "FAIL")
    assert wrong.record["findings"] and wrong.record["sides"] == {"after": "offset", "before": "live"}


@needs_mlx_lm
def test_another_build_with_other_weights_fails_by_its_greedy_tokens(synth: Synth, validate: Validate) -> None:
    folder, other = synth("olmo3"), synth("olmo3", seed=5)
    wrong = validate(folder, "--before", _served(other), "--after", _served(folder))
    assert wrong.record is not None and (wrong.code, wrong.record["verdict"]) == (1, "FAIL"), wrong.out
    VALIDATOR.validate(wrong.record)
    assert wrong.row(GREEDY)["result"] == "FAIL" and "0.05 deviations" in wrong.row(GREEDY)["evidence"]
    failed = [row["criterion"] for row in wrong.record["acceptance"] if row["result"] == "FAIL"]
    assert failed == [GREEDY] and BYTES not in _criteria(wrong.record)
    assert any("Which weights the before side serves is the word" in said for said in wrong.record["limits"])
    right = validate(folder, "--before", _served(folder), "--after", "mlx_lm")
    assert right.record is not None and (right.code, right.record["verdict"]) == (0, "PASS"), right.out
    assert right.row(GREEDY)["decisive_steps"] > 100


@needs_mlx_lm
@pytest.mark.parametrize("noisy", ["before", "after"])
def test_a_side_that_does_not_repeat_itself_is_compared_with_nothing(
    noisy: str, synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, noise = ReferenceSession.forward, np.random.default_rng(0)

    def unlike(session: Any, *arguments: Any, **named: Any) -> ForwardObservation:
        seen = forward(session, *arguments, **named)
        if seen.logits is None or type(session) is not ReferenceSession:  # that of the other engine rests on it
            return seen
        logits = seen.logits + noise.normal(0, 1, seen.logits.shape).astype(np.float32)
        return dataclasses.replace(seen, logits=logits)

    monkeypatch.setattr(ReferenceSession, "forward", unlike)
    sides = {"before": ("reference", "mlx_lm"), "after": ("mlx_lm", "reference")}[noisy]
    seen = validate(synth("olmo3"), "--before", sides[0], "--after", sides[1])
    assert seen.record is not None and (seen.code, seen.record["verdict"]) == (1, "INCONCLUSIVE"), seen.out
    assert seen.record["findings"] == []
    assert seen.row(GREEDY)["result"] == "INCONCLUSIVE"
    assert f"the {noisy} side does not repeat itself" in seen.row(GREEDY)["evidence"]
    assert seen.row(REPEATS)["result"] == ("INCONCLUSIVE" if noisy == "before" else "PASS")


@needs_mlx_lm
def test_one_engine_has_let_go_of_its_weights_before_the_other_loads_them(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, held = measuring.measure, []

    def watching(target: Any, *others: Any) -> Any:
        result = whole(target, *others)
        held.append((target.identity.kind, reference._model.cache_info().currsize, load.cache_info().currsize))
        return result

    monkeypatch.setattr("harness.validation.run.measure", watching)
    assert validate(synth("olmo3"), "--before", "mlx_lm", "--after", "reference").code == 0
    assert set(held) == {("mlx_lm", 0, 1), ("checkpoint", 1, 0)}
    held.clear()
    assert validate(synth("olmo3"), "--before", "reference", "--after", "mlx_lm").code == 0
    assert set(held) == {("mlx_lm", 0, 1), ("checkpoint", 1, 0)}


@needs_mlx_lm
def test_a_process_that_has_let_go_is_gone_and_comes_again(synth: Synth) -> None:
    folder = synth("olmo3")
    sides = sides_of(None, _served(folder), "mlx_lm")
    judged = open_judged(sides, str(folder), None, 60.0)
    other = open_other(sides, judged, None, 60.0)
    assert isinstance(other, WireEngine) and other.policies == ("live", "offset")
    worker = other._target.engine
    try:
        assert worker.pid is None, "it was asked what it is, and has its weights from then on"
        assert other.target("offset").open(("pool",)).forward(0, (1, 2)).logits is not None and worker.pid is not None
        other.release()
        assert worker.pid is None
    finally:
        other.close()


def test_the_estimate_is_that_of_the_engine_that_needs_more() -> None:
    plan = make_plan(Asked(16, 8, 40), images=False)
    small, large = (
        SimpleNamespace(needs=Footprint(weights, 8), vocab_size=10, compared=False) for weights in (10**6, 10**9)
    )
    alone, two = estimate(small, plan), estimate(small, plan, large)  # type: ignore[arg-type]
    assert two == estimate(large, plan, small) == estimate(large, plan) > 10**9 > alone  # type: ignore[arg-type]
    judged: Any = SimpleNamespace(needs=Footprint(10**9, 8), vocab_size=10, compared=True)
    assert estimate(judged, plan, large) == estimate(judged, plan) > 3 * 10**9  # type: ignore[arg-type]


@needs_mlx_lm
def test_a_comparison_that_was_stopped_goes_on(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Behind the before side, whose process serves something else by then: it is asked again, whichever is judged."""
    folder, link, whole, calls = synth("olmo3"), tmp_path / "served", measuring.measure, []
    link.symlink_to(synth("olmo3", seed=5))
    options = ("--before", _served(link), "--after", "mlx_lm")

    def stops(*given: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:  # the second program of the judged side
            raise KeyboardInterrupt
        return whole(*given)

    for changed in (False, True):
        calls.clear()
        monkeypatch.setattr("harness.validation.run.measure", stops)
        assert validate(folder, *options).record is None and len(calls) == 5
        monkeypatch.setattr("harness.validation.run.measure", whole)
        if changed:
            link.unlink()
            link.symlink_to(folder)
        seen = validate(folder, *options)
        assert seen.record is not None and seen.record["verdict"] == ("PASS" if changed else "FAIL"), seen.out
        assert ("does not answer as it did" in seen.err) == changed
        assert ("goes on behind 4 finished steps" in seen.err) != changed


@needs_mlx_lm
def test_what_cannot_be_compared_gets_one_line(synth: Synth, validate: Validate, tmp_path: Path) -> None:
    folder = synth("olmo3")
    seventeen = tmp_path / "seventeen"
    shutil.copytree(folder, seventeen)
    config = json.loads((folder / "config.json").read_text())
    (seventeen / "config.json").write_text(json.dumps(config | {"vocab_size": 17}))
    strange = tmp_path / "strange"
    shutil.copytree(folder, strange)
    (strange / "config.json").write_text(json.dumps(config | {"model_file": "mine.py"}))
    for where, options, words in (
        (folder, ("--before", TOY), "argument --before: 'wire:"),
        (folder, ("--before", TOY), "serves another model: its vocabulary has 17 tokens"),
        (folder, ("--before", "wire:true"), "argument --before: wire:true cannot be used: wire:'true': the engine"),
        (folder, ("--before", "nonsense"), "argument --before: 'nonsense' is no engine"),
        (folder, ("--before", "mlx_vlm"), "argument --before: 'mlx_vlm' reads no checkpoint here"),
        (
            folder,
            ("--before", "reference@library", "--after", "mlx_lm"),
            "argument --before: this engine has live",
        ),
        (folder, ("--before", "mlx_lm", "--dtype", "float16"), "argument --dtype: mlx_lm is judged in float32 alone"),
        (folder, ("--before", TOY, "--after", "wire:true", "--dtype", "float16"), "argument --dtype"),
        (folder, ("--engine", "mlx_lm", "--after", "reference"), "argument --after: 'reference' is judged"),
        (strange, ("--before", "mlx_lm"), "argument --before: mlx_lm cannot be used"),
    ):
        seen = validate(where, *options)
        assert (seen.code, seen.record) == (2, None), options
        assert words in seen.err and seen.err.count("\n") == 1, seen.err
    assert not list((tmp_path / "reports").glob("checkpoints/*"))


@needs_mlx_lm
def test_a_before_side_that_does_not_load_is_named_before_anything_is_measured(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from harness.targets import mlx_lm

    def never(*_: Any) -> Any:
        raise mlx_lm.UnknownFamily("it has no keys")

    monkeypatch.setattr("harness.targets.mlx_lm.of_checkpoint", never)
    seen = validate(synth("olmo3"), "--before", "mlx_lm")
    assert (seen.code, seen.record) == (2, None)
    last = seen.err.splitlines()[-1]
    assert last.startswith("kv-harness: error: argument --before: mlx_lm cannot be used: ")
    assert last.endswith("it has no keys") and "after/" not in seen.err
    assert not list((tmp_path / "reports" / "checkpoints").glob("*")), "half a run was left"


def test_a_dtype_is_of_the_engines_of_this_process(synth: Synth, validate: Validate) -> None:
    """Another process computes in what it was started with, beside whatever it is judged."""
    folder = str(synth("olmo3"))
    sides = sides_of(None, TOY, "reference")
    judged = open_judged(sides, folder, "float16", 60.0)
    assert judged.dtype == "float16"
    with pytest.raises(ValueError, match="argument --before"):  # of its vocabulary, not of the type
        open_other(sides, judged, "float16", 60.0)


def test_a_report_of_two_engines_has_a_name_of_its_own() -> None:
    def engine(name: str, label: str, dtype: str | None = None) -> Any:
        return SimpleNamespace(
            title="x", name=name, digests=SimpleNamespace(digest="0123456789"), label=label, dtype=dtype
        )

    plan: Any = SimpleNamespace(asked=Asked())
    sides = {"after": "live", "before": "live", "control": "offset"}
    mine, theirs = engine("reference", ""), engine("mlx_lm", "mlx_lm")
    wide = engine("reference", "", "float32")
    names = [
        Validation(judged, plan, sides, Path("o"), "", 0, other).stem.name
        for judged, other in ((mine, theirs), (theirs, mine), (theirs, wide), (wide, engine("mlx_lm", "mlx_lm")))
    ]
    assert names == [
        "x-01234567-before-mlx_lm-live",
        "x-01234567-mlx_lm-before-reference-live",
        "x-01234567-mlx_lm-before-reference-float32-live",
        "x-01234567-before-mlx_lm-live-float32",
    ]
