"""The protocol: its page says what the code says, codecs lose nothing and believe nothing, workers refuse in words."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import harness.wire
from harness.cli import main
from harness.rules import CacheRule
from harness.target import AttentionCall, CacheRows, ImageFormat, PositionCall, PromptInput, RemovalObservation
from harness.targets.naming import Asked, resolve
from harness.wire.check import checks
from harness.wire.codec import DTYPES, CodecError, decode, encode
from harness.wire.protocol import CAPABILITIES, MESSAGES, Description, ForwardAnswer, TellingAnswer
from harness.wire.serve import Server

HERE = Path(harness.wire.__file__).parent
PAGE = (HERE / "PROTOCOL.md").read_text(encoding="utf-8")
WORKER = f"{sys.executable} -m harness.wire.worker"


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_every_message_and_field_is_on_the_page_and_no_other() -> None:
    rows = [line.split("|") for line in section("Messages").splitlines() if line.startswith("| `")]
    listed = {row[1].strip(" `"): row for row in rows}
    assert list(listed) == list(MESSAGES)
    for name, (fields, _, needed) in MESSAGES.items():
        assert set(re.findall(r"`(\w+)`", listed[name][2])) == set(fields), name
        asked = re.findall(r"`(\w+)`", listed[name][4])
        assert asked == ([] if needed is None else [needed.name.lower()]), name


def test_every_capability_is_on_the_page_and_no_other() -> None:
    rows = [line.split("|")[1] for line in section("Capabilities").splitlines() if line.startswith("| `")]
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(CAPABILITIES)


@pytest.mark.parametrize(
    "kind", [Description, ForwardAnswer, AttentionCall, TellingAnswer, RemovalObservation, ImageFormat, PromptInput]
)
def test_every_field_of_what_is_sent_is_on_the_page(kind: Any) -> None:
    assert [field.name for field in dataclasses.fields(kind) if f"`{field.name}`" not in PAGE] == []


@pytest.mark.parametrize("name", DTYPES)
def test_arrays_keep_every_byte(name: str) -> None:
    numbers = (np.arange(24).reshape(2, 3, 4) % 2 if name == "bool" else np.arange(24).reshape(2, 3, 4)).astype(name)
    for array in (numbers, numbers[:, ::2], numbers.T, numbers[:0], np.array(numbers[0, 0, 1])):
        again = decode(np.ndarray, json.loads(json.dumps(encode(array))), "it")
        assert again.dtype == array.dtype and again.shape == array.shape and np.array_equal(again, array)


def test_a_nan_an_infinity_and_a_negative_zero_arrive() -> None:
    array = np.array([np.nan, np.inf, -np.inf, -0.0], np.float32)
    assert decode(np.ndarray, encode(array), "it").tobytes() == array.tobytes()


def test_answers_come_back_as_they_were() -> None:
    call = AttentionCall("fast", 2, 5, 5, 4, 2, "bool", (2, 5), np.ones((1, 1, 2, 5), bool))
    answer = ForwardAnswer(np.ones((2, 3), np.float32), (call,), (PositionCall("rope", np.arange(2)),), 0.5)
    data = json.loads(json.dumps(encode(answer)))
    assert encode(decode(ForwardAnswer, data, "answer")) == data
    assert "error" not in data and "scores" not in data["attention"][0]
    told = TellingAnswer((), (CacheRows(np.zeros((1, 1, 0, 2)), np.zeros((1, 1, 0, 2)), (1, 2)),))
    assert encode(decode(TellingAnswer, encode(told), "told")) == encode(told)
    assert encode((np.int64(3), np.float32(0.5), np.bool_(True))) == [3, 0.5, True]
    said = Description(1, "x", 5, (0, 1), (), windows=(None, 4), rules=(CacheRule(4, 1), None))
    assert decode(Description, json.loads(json.dumps(encode(said))), "answer") == said


WRONG: tuple[tuple[Any, Any, str], ...] = (
    (ForwardAnswer, [], "answer must be an object, got []"),
    (ForwardAnswer, {"logit": 1}, "answer has the unknown field 'logit'"),
    (ForwardAnswer, {"seconds": "1"}, "answer.seconds must be a number, got '1'"),
    (ForwardAnswer, {"error": 3}, "answer.error must be text, got 3"),
    (ForwardAnswer, {"attention": {}}, "answer.attention must be a list, got {}"),
    (ForwardAnswer, {"attention": [{}]}, "answer.attention[0] lacks 'heads'"),
    (RemovalObservation, {"removed": [True]}, "answer.removed[0] must be a whole number, got True"),
    (RemovalObservation, {"removed": [1.0]}, "answer.removed[0] must be a whole number, got 1.0"),
    (np.ndarray, [1.0], "answer must be an array: an object with dtype, shape and data"),
    (np.ndarray, {"dtype": "O", "shape": [], "data": ""}, "answer.dtype must be one of"),
    (np.ndarray, {"dtype": "int8", "shape": [-1], "data": ""}, "answer.shape must be a list of whole numbers"),
    (np.ndarray, {"dtype": "int8", "shape": [1] * 9, "data": "AA=="}, "answer.shape must be a list"),
    (np.ndarray, {"dtype": "int8", "shape": [1], "data": "A*=="}, "answer.data is not base64"),
    (np.ndarray, {"dtype": "int8", "shape": [10**15], "data": "AA=="}, "answer has 1 bytes, int8 of the shape"),
)


@pytest.mark.parametrize(("kind", "data", "said"), WRONG)
def test_what_a_worker_says_is_not_believed(kind: Any, data: Any, said: str) -> None:
    with pytest.raises(CodecError, match=re.escape(said)):
        decode(kind, data, "answer")


def test_a_worker_refuses_in_words_and_goes_on() -> None:
    server = Server(resolve("reference:qwen2_vl", Asked()).targets[0])

    def ask(line: object) -> dict[str, Any]:
        said: dict[str, Any] = json.loads(server.answer(line if isinstance(line, bytes) else json.dumps(line).encode()))
        return said

    refused = (
        (b"\xff", "no line of JSON"),
        (b"[1]", "no object with an id"),
        ({"id": 1, "do": "hello", "protocol": 9}, "speaks version 1"),
        ({"id": 1, "do": "tell"}, "no session is open"),
        ({"id": 1, "do": "hello"}, "has the fields protocol, not none"),
        ({"id": 1, "do": ["x"]}, "there is no message ['x']"),
    )
    for line, said in refused:
        assert said in ask(line)["bad_request"]
    opening = {"id": 2, "do": "open", "owners": ["pool"], "policy": "live", "attention": False, "arguments": False}
    assert ask(opening | {"owners": []})["bad_request"] and ask(opening) == {"id": 2}
    for do in ({"do": "rollback", "sequence": 1, "n": 1}, {"do": "forward", "sequence": 0, "tokens": []}):
        assert "bad_request" in ask({"id": 3, **do})
    limit = {"do": "enforce", "sequence": 0, "limit": 0, "generation": "trim", "keep": 0, "n_discard": 0}
    assert "limit must lie in" in ask({"id": 4, **limit})["bad_request"]
    assert "logits" in ask({"id": 5, "do": "forward", "sequence": 0, "tokens": [1, 2]})


def test_the_example_and_our_worker_pass_the_check(toy: str) -> None:
    ours = f"{WORKER} reference:qwen3_vl"
    for command, declared in ((toy, 18), (ours, 32), (f"{ours}+images", 35)):
        found = list(checks(command, 60))
        assert [check for check in found if check.verdict == "FAIL"] == []
        assert sum(check.verdict == "ok" for check in found) == declared and len(found) == 35


@pytest.mark.parametrize("change", [("float32", "float16"), ('"key_len": len(held)', '"key_len": 1'), ("VOCAB)", "3)")])
def test_the_check_finds_what_is_wrong(change: tuple[str, str], tmp_path: Path) -> None:
    text = (HERE / "examples" / "toy.py").read_text(encoding="utf-8")
    wrong = tmp_path / "toy.py"
    wrong.write_text(text.replace(*change), encoding="utf-8")
    assert change[0] in text and any(check.verdict == "FAIL" for check in checks(f"{sys.executable} {wrong}", 60))


def test_the_bug_that_the_example_names_is_found_as_what_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's own failure is an answer, with what was seen until then, and no complaint about the request."""
    monkeypatch.chdir(tmp_path)
    text = (HERE / "examples" / "toy.py").read_text(encoding="utf-8")
    comment = "  # the bug that the harness was made for: "
    right, _, wrong = next(line.strip() for line in text.splitlines() if comment in line).partition(comment)
    changed = text.replace(right, f"width = {wrong}")
    Path("toy.py").write_text(changed, encoding="utf-8")
    assert main(["run", "--target", f"wire:{sys.executable} toy.py", "--programs", "60", "--no-strict"]) == 1
    out = capsys.readouterr().out
    for name in ("mask_key_axis_equals_live_keys", "every_operation_completes"):
        assert re.search(rf"^FAIL +{name} ", out, re.M), out
    assert "the mask has 2 keys, attention received 1" in out and "BadAnswer" not in out


def test_the_command_prints_a_line_for_every_check(toy: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["wire-check", toy]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        len(lines) == 36 and lines[0].startswith("ok    hello: toy") and lines[-1] == "the worker speaks the protocol"
    )
    assert main(["wire-check", "false"]) == 2
    assert "exited with code 1" in capsys.readouterr().err


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here")
def test_the_worker_in_cpp_is_judged_and_its_crash_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, option in (("right", "-DNDEBUG"), ("wrong", "-DOFFSET_MASK")):
        command = ["g++", "-std=c++17", "-O1", "-Wall", "-Werror", option, "-o", name, str(HERE / "examples/toy.cpp")]
        subprocess.run(command, check=True)
    assert [check for check in checks("./right", 60) if check.verdict == "FAIL"] == []
    assert main(["run", "--target", "wire:./right,wire:./wrong", "--programs", "60", "--no-strict", "--out", "o"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^wire-toy-cpp +PASS ", out, re.M) and re.search(r"^wire-toy-cpp-2 +FAIL ", out, re.M)
    crash = re.search(
        r"raised EngineDied: the engine was killed by SIGABRT; .*mask is too wide.*\n +program +(.*)", out
    )
    assert crash is not None and crash[1].count(" ; ") == 2


def test_the_example_stands_alone() -> None:
    """The examples import nothing of the harness: they are to be copied."""
    text = (HERE / "examples" / "toy.py").read_text(encoding="utf-8")
    assert "import harness" not in text and "from harness" not in text
