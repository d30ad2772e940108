"""Trace files: both ways, and everything that a file can be instead."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kv_harness_fake_target import FakeTarget

from harness.execution import execute
from harness.findings import Finding, Violation
from harness.operations import Chunk, Prefill, Program, TrimFront
from harness.recording import record
from harness.target import PositionCall
from harness.trace import MAX_BYTES, Trace, TraceError, read_trace

PROGRAM = Program((Prefill(3), TrimFront(1), Chunk(2)))
VERSIONS = {"kv-harness": "0.1.0"}
FINDING = {"property": "some_mask_width", "step": 2, "message": "m", "reproducible": True}
SMALL = Trace({"kind": "fake"}, PROGRAM, FINDING, ({"n": 10},), VERSIONS)


def recorded() -> Trace:
    target = FakeTarget(policy="offset")
    finding = Finding("mask_key_axis_equals_live_keys", "fake/fake", Violation(2, "the mask"), PROGRAM)
    return record(execute(target, PROGRAM), finding, VERSIONS)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path: Path) -> str:
    """What is wrong with the file, without its name."""
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ") and "\n" not in message and len(message) < len(str(path)) + 300
    return message.removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    "trace",
    [
        SMALL,
        recorded(),
        replace(SMALL, finding=None, steps=()),
        replace(SMALL, versions={}),
        replace(SMALL, finding=FINDING | {"reproducible": False}),
        replace(SMALL, finding=FINDING | {"step": None}),
    ],
)
def test_what_is_written_is_read(trace: Trace, tmp_path: Path) -> None:
    again = read_trace(write(tmp_path / "t.json", trace.to_text()))
    assert again == trace and again.fingerprint == trace.fingerprint and again.to_text() == trace.to_text()


def test_a_recorded_step_says_what_was_seen() -> None:
    trace = recorded()
    prefill, trim, chunk = trace.steps
    assert prefill["forwards"][0]["attention"][1] == {
        "layer": 4, "queries": 3, "keys": 3, "values": 3, "mask": "bool", "mask_shape": [3, 3],
    }  # fmt: skip
    assert (trim["removed"], trim["expected_removed"], trim["caches_trimmed"]) == ([1, 1], 1, 2)
    assert trim["after"] == {"offset": 3, "live_start": 1, "live_len": 2}
    assert chunk["error"] == "ValueError: broadcast (2, 5)" and len(chunk["forwards"][0]["attention"]) == 1
    assert chunk["forwards"][0]["positions"] == [{"kind": "rope", "first": 3.0, "last": 4.0}]
    assert trace.file_name == f"mask_key_axis-{trace.fingerprint[:8]}.json"
    assert replace(SMALL, finding=None).file_name.startswith("trace-")


def test_positions_that_are_no_numbers_can_be_recorded(tmp_path: Path) -> None:
    """A target may well hand out nan: the finding about it must reach the disk."""
    run = execute(FakeTarget(), PROGRAM)
    forward = run.steps[0].forwards[0]
    odd = (PositionCall("rope", np.array([float("nan"), 1.0, float("inf")])),)
    run.steps[0] = replace(run.steps[0], forwards=(replace(forward, seen=replace(forward.seen, positions=odd)),))
    trace = record(run, None, VERSIONS)
    assert trace.steps[0]["forwards"][0]["positions"] == [{"kind": "rope", "first": "nan", "last": "inf"}]
    assert read_trace(write(tmp_path / "t.json", trace.to_text())) == trace


def test_the_fingerprint_covers_everything_but_the_versions() -> None:
    others = [
        replace(SMALL, target={"kind": "other"}),
        replace(SMALL, target={"kind": "fake", "x": None}),
        replace(SMALL, program=Program((Prefill(3), TrimFront(1), Chunk(3)))),
        replace(SMALL, program=Program((Prefill(3), TrimFront(1, 1), Chunk(2)))),
        replace(SMALL, program=Program((Prefill(3), TrimFront(1), Prefill(2)))),
        replace(SMALL, program=Program((TrimFront(1), Prefill(3), Chunk(2)))),
        replace(SMALL, program=Program(PROGRAM.operations, ("model",))),
        replace(SMALL, program=Program(PROGRAM.operations, ("pool", "pool"))),
        replace(SMALL, finding=None),
        *(
            replace(SMALL, finding=FINDING | change)
            for change in ({"property": "p"}, {"step": None}, {"message": ""}, {"reproducible": False})
        ),
        replace(SMALL, steps=()),
        replace(SMALL, steps=({"n": 11},)),
        replace(SMALL, steps=({"n": 10}, {"n": 10})),
    ]
    prints = [SMALL.fingerprint, *(other.fingerprint for other in others)]
    assert len(set(prints)) == len(prints)
    assert replace(SMALL, versions={"mlx": "9"}).fingerprint == SMALL.fingerprint
    assert replace(SMALL, target=dict(reversed(SMALL.target.items()))).fingerprint == SMALL.fingerprint


def flips(size: int) -> list[tuple[int, int]]:
    """(byte, bit): three bits of every byte, among them the one that turns a capital."""
    return [(at, 1 << bit) for at in range(size) for bit in {at % 8, (at + 3) % 8, 5}]


def test_a_flipped_bit_is_refused_or_changes_nothing(tmp_path: Path) -> None:
    content, path = SMALL.to_text().encode(), tmp_path / "t.json"
    accepted = 0
    for at, bit in flips(len(content)):
        changed = bytearray(content)
        changed[at] ^= bit
        path.write_bytes(changed)
        trace, message = None, ""
        try:
            trace = read_trace(path)
        except TraceError as error:
            message = str(error)
        if trace is None:
            assert message.startswith(f"{path}: ") and "\n" not in message
        else:
            accepted += 1
            assert replace(trace, versions=VERSIONS) == SMALL and trace.fingerprint == SMALL.fingerprint
    assert 0 < accepted < len(content)  # white space, and the text of the versions


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_replaced_byte_is_refused_or_changes_nothing(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(SMALL.to_text().encode())
    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(
        st.sampled_from(b'0123456789-+.eE" \t{}[],:x\x00\xff')
    )
    path = write(tmp_path / "t.json", bytes(content))
    try:
        trace = read_trace(path)
    except TraceError:
        return
    assert replace(trace, versions=VERSIONS) == SMALL


@pytest.mark.parametrize("trace", [SMALL, recorded()], ids=["small", "recorded"])
def test_a_truncated_file_is_refused(trace: Trace, tmp_path: Path) -> None:
    content = trace.to_text().encode()
    for length in range(0, len(content) - 1, 1 if len(content) < 1500 else 17):
        assert "cut off" in refusal(write(tmp_path / "t.json", content[:length]))
    assert read_trace(write(tmp_path / "t.json", content[:-1])) == trace  # the last newline alone


def edited(**changes: Any) -> str:
    return json.dumps(json.loads(SMALL.to_text()) | changes)


NOT_TRACES = {
    "empty": ("", "not JSON"),
    "white space": (" \n", "not JSON"),
    "text": ("FAIL  some property", "not JSON"),
    "not UTF-8": (b"\xff\xfe{\x00}\x00", "not text"),
    "latin-1": (SMALL.to_text().replace('"m"', '"\xe9"').encode("latin-1"), "not text"),
    "byte order mark": (b"\xef\xbb\xbf" + SMALL.to_text().encode(), "BOM"),
    "nul bytes": (b"\0" * 4096, "not JSON"),
    "null": ("null", "not a trace"),
    "a number": ("1e5", "not a trace"),
    "a list": ("[]", "not a trace"),
    "foreign object": ('{"a": 1}', "not a trace"),
    "two traces": (SMALL.to_text() * 2, "Extra data"),
    "foreign format": (edited(format="junit"), "not a trace"),
    "deep list": ("[" * 100_000, "nested too deeply"),
    "deep steps": (edited().replace('"n": 10', '"n": ' + "[" * 900 + "]" * 900), ""),
    "deeper object": ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
    "NaN": (edited().replace('"n": 10', '"n": NaN'), "NaN is not JSON"),
    "minus infinity": (edited().replace('"n": 10', '"n": -Infinity'), "-Infinity is not JSON"),
    "a number that reads as infinity": (edited().replace('"n": 10', '"n": 1e999'), ""),
    "a key twice": ('{"format": "x", ' + SMALL.to_text().lstrip("{\n"), "'format' stands twice"),
    "a key twice inside": (edited().replace('"n": 10', '"n": 10, "n": 10'), "'n' stands twice"),
    "five thousand digits": (edited().replace('"n": 10', '"n": ' + "9" * 5000), ""),
    "a huge version": (edited(version=0).replace('"version": 0', '"version": ' + "9" * 4000), "newer harness"),
    "future version": (edited(version=2), "upgrade it"),
    "version 0": (edited(version=0), "no trace version 0"),
    "version true": (edited(version=True), "whole number"),
    "version text": (edited(version="1"), "whole number"),
    "version 1.0": (edited(version=1.0), "whole number"),
    "no version": (edited(version=None), "whole number"),
    "extra field": (edited(extra=1), "'extra' is unknown"),
    "target a list": (edited(target=[]), "must be objects"),
    "versions null": (edited(versions=None), "must be objects"),
    "steps an object": (edited(steps={}), "list of objects"),
    "a step a number": (edited(steps=[1]), "list of objects"),
    "finding text": (edited(finding="mask"), "'finding' must be null"),
    "finding without step": (edited(finding={"property": "p", "message": "m"}), "'finding' must be null"),
    "finding without reproducible": (
        edited(finding={"property": "p", "step": 1, "message": "m"}),
        "with property, step, message, reproducible",
    ),
    "finding with another field": (edited(finding=FINDING | {"why": ""}), "'finding' must be null"),
    "finding's property null": (edited(finding=FINDING | {"property": None}), "must be text"),
    "finding's message a number": (edited(finding=FINDING | {"message": 1}), "must be text"),
    "finding's reproducible null": (edited(finding=FINDING | {"reproducible": None}), "must be true or false"),
    "finding's reproducible 1": (edited(finding=FINDING | {"reproducible": 1}), "must be true or false"),
    "finding's reproducible text": (edited(finding=FINDING | {"reproducible": "true"}), "must be true or false"),
    "finding's step text": (edited(finding=FINDING | {"step": "1"}), "'step' must be"),
    "finding's step true": (edited(finding=FINDING | {"step": True}), "'step' must be"),
    "finding's step -1": (edited(finding=FINDING | {"step": -1}), "'step' must be"),
    "finding's step beyond": (edited(finding=FINDING | {"step": 3}), "names step 3, the program has 3"),
    "finding's step far beyond": (edited(finding=FINDING | {"step": 10**300}), "the program has 3"),
    "empty program": (edited(program={"owners": ["pool"], "operations": []}), "nothing to replay"),
    "empty program without a finding": (
        edited(program={"owners": ["pool"], "operations": []}, finding=None),
        "nothing to replay",
    ),
    "program null": (edited(program=None), "a program must be"),
    "program of nonsense": (edited(program={"owners": ["pool"], "operations": [{"op": "jump"}]}), "unknown operation"),
    "program too large": (
        edited(program={"owners": ["pool"], "operations": [{"op": "chunk", "tokens": 10**12, "sequence": 0}]}),
        "must lie in",
    ),
    "fingerprint null": (edited(fingerprint=None), "does not fit its fingerprint"),
    "another message": (edited(finding=FINDING | {"message": "n"}), "does not fit"),
    "another reproducible": (edited(finding=FINDING | {"reproducible": False}), "does not fit"),
    "lone surrogate": (edited().replace('"fake"', '"\\ud800"'), "does not fit"),
}


@pytest.mark.parametrize("name", NOT_TRACES)
def test_what_is_not_a_trace_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    content, why = NOT_TRACES[name]
    assert why in refusal(write(tmp_path / "t.json", content))


@pytest.mark.parametrize("name", sorted(json.loads(SMALL.to_text())))
def test_a_missing_field_is_named(name: str, tmp_path: Path) -> None:
    data = json.loads(SMALL.to_text())
    del data[name]
    why = {"format": "not a trace", "version": "whole number"}.get(name, f"'{name}' is missing")
    assert why in refusal(write(tmp_path / "t.json", json.dumps(data)))


def loop(path: Path) -> Path:
    path.symlink_to(path)
    return path


def huge(path: Path) -> Path:
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)  # sparse
    return path


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: path, "no such file"),
        (lambda path: path / "below", "no such file"),
        (lambda path: path.parent, "not a regular file"),
        (lambda path: path.parent / ("x" * 300), ""),
        (lambda path: write(path, "") / "below", ""),
        (loop, ""),
        (fifo, "not a regular file"),
        (lambda path: Path(os.devnull), "not a regular file"),
        (huge, "larger than"),
    ],
    ids=["missing", "no folder", "folder", "name too long", "below a file", "symlink loop", "FIFO", "device", "huge"],
)
def test_what_cannot_be_opened_is_refused_at_once(make: Callable[[Path], Path], why: str, tmp_path: Path) -> None:
    started = time.monotonic()
    assert why in refusal(make(tmp_path / "t.json"))
    assert time.monotonic() - started < 5


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.json", SMALL.to_text())
    path.chmod(0)
    assert "cannot be read" in refusal(path)


def test_a_symlink_to_a_trace_is_read(tmp_path: Path) -> None:
    link = tmp_path / "link.json"
    link.symlink_to(write(tmp_path / "t.json", SMALL.to_text()))
    assert read_trace(link) == SMALL
