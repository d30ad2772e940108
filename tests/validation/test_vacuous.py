"""Validations that prove nothing: each ends in VACUOUS, INCONCLUSIVE or a refusal, never in PASS."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import numpy as np
import pytest

from harness.checkpoints import fingerprint, load_model, open_checkpoint, synthesise
from harness.cli import main
from harness.reporting.checkpoint import load_checkpoint_schema
from harness.target import ForwardObservation
from harness.targets import reference
from harness.targets.checkpoint import target_of
from harness.targets.reference_session import ReferenceSession
from reference_models.engine import masks
from tests.validation.conftest import Synth, Validate

VALIDATOR = jsonschema.Draft202012Validator(load_checkpoint_schema())


@pytest.fixture(autouse=True)
def _fresh_models() -> None:
    reference._model.cache_clear()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", "24"), "a prompt needs more than 25 tokens; 24 were asked for"),
        (("--tokens", "25"), "comes one token, which builds no mask"),
        (("--prefill-chunk-size", "1"), "chunks of one token build no mask"),
        (("--max-kv-size", "64"), "a prompt of 40 tokens never exceeds --max-kv-size 64"),
    ],
)
def test_a_plan_that_shows_nothing_is_vacuous_and_loads_nothing(
    options: tuple[str, ...], words: str, synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("loaded")

    monkeypatch.setattr("harness.checkpoints.load_model", never)
    seen = validate(synth("qwen2_vl"), *options)
    assert seen.code == 1 and seen.record is not None
    assert seen.out.startswith("VACUOUS  ") and seen.out.count("\n") == 2 and words in seen.out
    VALIDATOR.validate(seen.record)
    assert seen.record["verdict"] == "VACUOUS" and words in seen.record["verdict_reason"]
    assert [(row["result"], row["decisive_steps"]) for row in seen.record["acceptance"]] == [("VACUOUS", 0)]
    assert seen.record["plan"]["first_decisive"] is None and not seen.record["plan"]["programs"]
    assert seen.record["limits"] == [
        "Anything at all: no weights were loaded, no program was run, no property was judged."
    ]
    instead = seen.record["instead"]
    assert "ask for --" in instead
    assert seen.markdown is not None and f"## What to ask for instead\n\n{instead}\n" in seen.markdown
    report = Path(seen.out.splitlines()[-1].removeprefix("report in "))
    page = report.with_suffix(".html").read_text()
    assert report.read_text() == seen.markdown and "What to ask for instead" in page and instead in page
    index = report.parents[1] / "index.md"
    assert main(["report", "--out", str(index.parent)]) == 0
    assert "| VACUOUS " in index.read_text() and report.read_text() == seen.markdown


def test_a_report_of_nothing_takes_no_pass(synth: Synth, validate: Validate) -> None:
    """The schema lets a record be empty only where it says what to ask for instead."""
    seen = validate(synth("nemotron_nas"), "--tokens", "24")
    assert seen.record is not None
    for wrong in (seen.record | {"verdict": "PASS"}, {k: v for k, v in seen.record.items() if k != "instead"}):
        assert not VALIDATOR.is_valid(wrong)


def test_a_folder_that_is_called_after_another_family_is_refused(validate: Validate, tmp_path: Any) -> None:
    folder = tmp_path / "nemotron_nas-tiny"
    synthesise("qwen2_vl", folder)
    seen = validate(folder)
    assert (seen.code, seen.record) == (2, None)
    assert "nemotron" in seen.err and seen.err.count("\n") == 1


def test_a_target_whose_attention_is_not_seen_passes_nothing(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = ReferenceSession.forward

    def hidden(*arguments: Any, **named: Any) -> ForwardObservation:
        return dataclasses.replace(forward(*arguments, **named), attention=())

    monkeypatch.setattr(ReferenceSession, "forward", hidden)
    seen = validate(synth("nemotron_nas"))
    assert seen.code == 1 and seen.record is not None
    assert seen.record["verdict"] == "INCONCLUSIVE"
    assert seen.row("mask_key_axis_equals_live_keys")["result"] == "VACUOUS"
    assert "hid attention" in seen.row("keys_equal_ledger_live_length")["evidence"]


def test_a_path_that_builds_no_mask_is_vacuous(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLX's own "causal" is right behind a trim, under either policy: nothing was put to the test."""
    monkeypatch.setattr(masks, "chunk_mask", lambda l, *_: "causal" if l > 1 else None)
    seen = validate(synth("nemotron_nas"))
    assert seen.code == 1 and seen.record is not None
    assert (seen.record["verdict"], seen.record["findings"]) == ("VACUOUS", [])
    for criterion in ("mask_key_axis_equals_live_keys", "untrimmed_outputs_are_byte_identical"):
        assert seen.row(criterion)["result"] == "VACUOUS"


def test_a_planted_bug_that_is_not_caught_is_no_pass(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk_mask = masks.chunk_mask
    monkeypatch.setattr(masks, "chunk_mask", lambda l, cache, policy, window=None: chunk_mask(l, cache, "live", window))
    seen = validate(synth("nemotron_nas"))
    assert seen.code == 1 and seen.record is not None
    assert (seen.record["verdict"], seen.record["findings"]) == ("VACUOUS", [])
    row = seen.row("the offset mask policy is caught on the same plan")
    assert row["result"] == "VACUOUS" and "bounded" in row["evidence"]


def test_a_target_that_does_not_repeat_itself_is_inconclusive(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, noise = ReferenceSession.forward, np.random.default_rng(0)

    def noisy(*arguments: Any, **named: Any) -> ForwardObservation:
        seen = forward(*arguments, **named)
        if seen.logits is None:
            return seen
        logits = seen.logits + noise.normal(0, 1, seen.logits.shape).astype(np.float32)
        return dataclasses.replace(seen, logits=logits)

    monkeypatch.setattr(ReferenceSession, "forward", noisy)
    seen = validate(synth("nemotron_nas"), "--before", "offset")
    assert seen.code == 1 and seen.record is not None
    assert (seen.record["verdict"], seen.record["findings"]) == ("INCONCLUSIVE", [])
    for criterion in ("same_program_same_bytes", "untrimmed_outputs_are_byte_identical", "outputs_equal_the_witness"):
        assert seen.row(criterion)["result"] == "INCONCLUSIVE"
    assert seen.row("untrimmed logits are those of the before side, byte for byte")["result"] == "INCONCLUSIVE"
    assert seen.row("mask_key_axis_equals_live_keys")["result"] == "PASS"


def test_a_before_side_that_does_not_repeat_itself_is_inconclusive(
    synth: Synth, validate: Validate, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, noise = ReferenceSession.forward, np.random.default_rng(0)

    def noisy(session: Any, *arguments: Any, **named: Any) -> ForwardObservation:
        seen = forward(session, *arguments, **named)
        if seen.logits is None or session._policy == "live":
            return seen
        return dataclasses.replace(seen, logits=seen.logits + noise.normal(0, 1, seen.logits.shape).astype(np.float32))

    monkeypatch.setattr(ReferenceSession, "forward", noisy)
    seen = validate(synth("nemotron_nas"), "--before", "offset")
    assert seen.code == 1 and seen.record is not None
    assert (seen.record["verdict"], seen.record["findings"]) == ("INCONCLUSIVE", [])
    not_compared = [row["criterion"] for row in seen.record["acceptance"] if row["result"] == "INCONCLUSIVE"]
    assert not_compared == [
        "untrimmed_outputs_are_byte_identical",
        "the before side repeats itself: same_program_same_bytes",
        "untrimmed logits are those of the before side, byte for byte",
        "greedy tokens are those of the before side, where both are decided",
    ]
    assert seen.row("same_program_same_bytes")["result"] == "PASS"


@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"dtype": "float16"}])
def test_what_is_judged_has_the_weights_of_the_checkpoint(options: dict[str, Any], synth: Synth) -> None:
    folder = synth("nemotron_nas", **options)
    checkpoint = open_checkpoint(folder)
    target = target_of(checkpoint, str(folder), fingerprint(checkpoint).digest)
    tokens = mx.array([[1, 2, 3]])
    model = load_model(checkpoint)
    expected = np.array(model(tokens, model.make_caches()).astype(mx.float32))[0]
    for policy in ("live", "offset"):
        seen = dataclasses.replace(target, policy=policy).open(("pool",)).forward(0, (1, 2, 3))
        assert seen.logits is not None and (seen.logits == expected).all()
    assert target.variant.build(7).make_caches() is not None  # whatever the seed
