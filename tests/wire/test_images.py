"""Prompts with images over the wire: nothing is lost of them, what makes no sense is refused, and bugs in their reading
are found."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harness.wire
from harness.capability import Capability
from harness.cli import main
from harness.execution import execute
from harness.images import prompt_input
from harness.judging import Evidence
from harness.media import Media
from harness.operations import Batch, BatchForward, Chunk, Decode, Fork, Operation, Owner, Prefill, Program, Reset
from harness.target import ImageFormat, PromptInput
from harness.targets.naming import Asked, TargetError, resolve, target_from_identity
from harness.wire.check import checks
from harness.wire.codec import encode
from harness.wire.process import BadAnswer, WorkerError
from harness.wire.prompts import an_image, another_picture, wrong_format, wrong_with
from harness.wire.serve import Server

IMAGE, SECOND, VIDEO = Media(2, 2, 3), Media(11, 1, 2), Media(3, 2, 2, 3)
PROGRAMS: tuple[tuple[tuple[Operation, ...], tuple[Owner, ...]], ...] = (
    (
        (Prefill(4, media=(IMAGE, SECOND)), Chunk(5), Chunk(6), Decode(2), Reset(), Prefill(3, media=(VIDEO,))),
        ("pool",),
    ),
    ((Prefill(20, media=(VIDEO,)), Prefill(3, 1), Fork(0, 1), Chunk(2, 1), Decode(1)), ("pool", "pool")),
    ((Prefill(6, media=(IMAGE,)), Prefill(2, 1), Batch((0, 1)), BatchForward((4, 1))), ("pool", "pool")),
    ((Prefill(3), Chunk(2), Decode(1)), ("pool",)),
)
FORMAT = ImageFormat(37, 38, 2, 24, False, 39)


def worker(bug: str, name: str = "reference:qwen2_vl+images") -> str:
    return f"{sys.executable} {Path(__file__).parent / 'broken.py'} {bug} {name}"


def seen(run: Any) -> list[str]:
    """All that was observed, as text, but for the seconds it took."""
    told = []
    for step in run.steps:
        forwards = [encode(dataclasses.replace(forward.seen, seconds=0, given=())) for forward in step.forwards]
        caches = [(each.lengths, each.rows, each.memory) for each in step.told]
        told.append(json.dumps([encode([step.removal, step.copied, caches]), forwards]))
    return told


@pytest.mark.parametrize("name", ["reference:qwen2_vl+images", "reference:qwen3_vl+images"])
def test_all_that_is_observed_is_the_same(name: str) -> None:
    here = resolve(name, Asked()).targets[0]
    with closing(resolve(f"wire:{sys.executable} -m harness.wire.worker {name}", Asked())) as subject:
        there = subject.targets[0]
        assert subject.path == "images" and there.images == here.images
        for operations, owners in PROGRAMS:
            runs = [execute(target, Program(operations, owners), tell=True) for target in (here, there)]
            assert all(forward.seen.error is None for step in runs[0].steps for forward in step.forwards)
            assert seen(runs[0]) == seen(runs[1])
            free: list[Any] = [Evidence(run).cache_free for run in runs]
            assert np.array_equal(free[0].logits, free[1].logits)


def test_a_worker_of_text_gets_no_image_and_loses_nothing(toy: str) -> None:
    for name in (toy, f"{sys.executable} -m harness.wire.worker reference:qwen2_vl"):
        with closing(resolve(f"wire:{name}", Asked())) as subject:
            assert subject.path == "text" and subject.targets[0].images is None
            assert "the engine says nothing of images" in subject.limits[-1]
            execute(subject.targets[0], Program((Prefill(2), Chunk(2))))
            with pytest.raises(ValueError, match="takes no images"):
                execute(subject.targets[0], Program((Prefill(8, media=(IMAGE,)),)))


def test_a_trace_names_the_path() -> None:
    command = f"{sys.executable} -m harness.wire.worker reference:qwen2_vl"
    with closing(resolve(f"wire:{command}+images", Asked())) as subject:
        identity = subject.targets[0].identity
        data = identity.to_json()
    assert data["path"] == "images" and identity.name == "wire/qwen2_vl+images@live-mask"
    again: Any = target_from_identity(data, Asked(run_command=True))
    assert again.identity == identity
    again.engine.stop()
    with pytest.raises(TargetError, match="the engine is not that of the trace: its path is"):
        target_from_identity(data | {"command": command}, Asked(run_command=True))
    text: Any = target_from_identity({k: v for k, v in data.items() if k != "path"}, Asked(run_command=True))
    assert text.identity.path == "text" and text.images is None and Capability.IMAGES not in text.capabilities
    execute(text, Program((Prefill(2), Chunk(2))))
    text.engine.stop()


WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"tokens": ()}, "tokens must be at least one"),
    ({"tokens": (1, 40)}, "each from 0 to 39"),
    ({"tokens": (39, 37)}, "1 tokens stand for 8 patches, 4 to a token"),
    ({"tokens": (39, 37, 37, 38)}, "'video': 1 tokens stand for what is not given"),
    ({"pixel_values": None}, "a grid and no pixels"),
    ({"pixel_values": np.zeros((8, 25), np.float32)}, "pixels of the shape [8, 25], its grids have 8 patches of 24"),
    ({"pixel_values": np.zeros((8, 24), np.int32)}, "pixels of the shape"),
    ({"image_grid_thw": np.array([[1, 2]])}, "a grid is [n, 3] whole numbers"),
    ({"image_grid_thw": np.array([[0, 2, 4]])}, "a grid is [n, 3] whole numbers above 0"),
    ({"image_grid_thw": np.array([[1.0, 2.0, 4.0]])}, "a grid is [n, 3] whole numbers"),
)


@pytest.mark.parametrize(("change", "said"), WRONG, ids=[said for _, said in WRONG])
def test_a_prompt_that_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    media = (Media(2, 1, 2),)
    prompt = prompt_input(0, media, 6, 40, FORMAT)
    assert wrong_with(prompt, FORMAT, 40) is None
    assert said in (wrong_with(dataclasses.replace(prompt, **change), FORMAT, 40) or "")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({"video_token": 40}, "from 0 to 39", id="no-such-token"),
        pytest.param({"start_token": 37}, "the token in front of one stands for one", id="one-for-both"),
        pytest.param({"merge": 0}, "merge and patch_pixels must be above 0", id="merge"),
    ],
)
def test_a_format_that_makes_no_sense_is_refused(change: dict[str, Any], said: str) -> None:
    assert wrong_format(FORMAT, 40) is None and wrong_format(dataclasses.replace(FORMAT, start_token=None), 40) is None
    assert said in (wrong_format(dataclasses.replace(FORMAT, **change), 40) or "")
    assert wrong_format(FORMAT, 40) is None and "fewer than two" in (
        wrong_format(ImageFormat(0, 1, 2, 4, True), 3) or ""
    )


def test_a_worker_refuses_prompts_in_words_and_goes_on() -> None:
    target = resolve("reference:qwen2_vl+images", Asked()).targets[0]
    assert target.images is not None
    prompt = an_image(target.images, target.vocab_size)
    opening = {"do": "open", "owners": ["pool"], "policy": "live", "attention": False, "arguments": False}

    def ask(server: Server, **request: Any) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(server.answer(json.dumps({"id": 1, **request}).encode()))
        return said

    def told(server: Server, given: PromptInput, sequence: int = 0) -> dict[str, Any]:
        return ask(server, do="prompt", sequence=sequence, prompt=encode(given))

    server = Server(target)
    assert ask(server, **opening) == {"id": 1} and told(server, prompt) == {"id": 1}
    assert "there is no sequence 1" in told(server, prompt, 1)["bad_request"]
    wrong = dataclasses.replace(prompt, tokens=prompt.tokens[:-3])
    assert "the prompt: of its kind 'image'" in told(server, wrong)["bad_request"]
    other = [(prompt.tokens[0] + 1) % 5]
    assert "the first of the prompt" in ask(server, do="forward", sequence=0, tokens=other)["bad_request"]
    told(server, prompt)
    assert "logits" in ask(server, do="forward", sequence=0, tokens=[*prompt.tokens, 1])  # and what comes behind it
    told(server, prompt)
    ask(server, **opening)  # which ends the session, and what it was told
    assert "logits" in ask(server, do="forward", sequence=0, tokens=other)
    free = {"tokens": np.array([1]), "positions": np.array([0]), "visible": np.ones((1, 1), bool)}
    for places, number in ((np.zeros((3, 2), int), -1), (np.zeros((3, 1), int), 0)):
        asked = encode([places, np.array([number]), ()])
        rest = dict(zip(("places", "prompt_of", "prompts"), asked, strict=True))
        sent = {name: encode(array) for name, array in free.items()}
        assert "numbers of prompts" in ask(server, do="cache_free_of_prompts", **sent, **rest)["bad_request"]
    text = Server(resolve("reference:qwen2_vl", Asked()).targets[0])
    assert "needs the capability 'images'" in told(text, prompt)["bad_request"]


@pytest.mark.parametrize(
    "change",
    [('["front_trim"', '["images", "front_trim"'), ('"family"', '"images": {}, "family"')],
    ids=["capability-alone", "field-alone"],
)
def test_an_engine_that_says_half_of_it_is_refused(change: tuple[str, str], tmp_path: Path) -> None:
    text = (Path(harness.wire.__file__).parent / "examples" / "toy.py").read_text(encoding="utf-8")
    assert text.count(change[0]) == 1
    (tmp_path / "toy.py").write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(WorkerError, match=r"'images' without that field|answer.images lacks") as error:
        next(checks(f"{sys.executable} {tmp_path / 'toy.py'}", 60))
    assert isinstance(error.value, BadAnswer)


def test_the_check_finds_a_worker_that_does_not_look() -> None:
    failed = [check.name for check in checks(worker("blind"), 60) if check.verdict == "FAIL"]
    assert [name for name in failed if name.startswith("prompt: another image")]
    assert another_picture(dataclasses.replace(prompt_input(0, (VIDEO,), 4, 40, FORMAT))).pixel_values is None


@pytest.mark.parametrize("bug", ["none", "blind", "wide"])
def test_bugs_in_the_reading_of_images_are_found_over_the_wire(
    bug: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    found = bug != "none"
    assert main(["run", "--target", f"wire:{worker(bug)}", "--programs", "24", "--no-strict", "--out", "o"]) == found
    data = json.loads((Path("o") / "targets" / "wire-qwen2_vl-images.json").read_text())
    failed = {prop["id"] for prop in data["properties"] if prop["verdict"] == "FAIL"}
    expected = {"blind": "outputs_equal_the_cache_free_forward", "wide": "mask_key_axis_equals_live_keys"}
    assert (expected[bug] in failed) if found else not failed
    assert data["path"] == "images" and (found or data["control"]["caught"])
    assert bool(re.search(r"^FAIL ", capsys.readouterr().out, re.M)) == found
