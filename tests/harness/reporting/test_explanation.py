"""``kv-harness explain``: a trace in words."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness import cli
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import judge_program
from harness.media import Media
from harness.operations import (
    OPERATIONS,
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    Prefill,
    Program,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.recording import record
from harness.reporting.explanation import explanation
from harness.trace import Trace, TraceError

SENTENCES = {prop.id: prop.sentence for prop in properties.ALL}


def explained(trace: Trace) -> list[str]:
    return explanation(trace, SENTENCES, "kv-harness replay X").splitlines()


def of_bug() -> Trace:
    wrong, program = FakeTarget(policy="offset"), Program((Prefill(6), TrimFront(2), Chunk(3), Decode(1)))
    with pytest.raises(FindingError) as caught:
        judge_program(wrong, program, [properties.BY_ID["mask_key_axis_equals_live_keys"]])
    return record(execute(wrong, program), caught.value.finding, {})


def test_the_historic_bug_in_words() -> None:
    lines = explained(of_bug())
    assert lines[2] == "Broken: mask_key_axis_equals_live_keys"
    assert lines[3].endswith(SENTENCES["mask_key_axis_equals_live_keys"])
    here = lines.index("    HERE it broke.")
    trim, chunk = lines.index("2. TrimFront(2): drop the oldest 2 keys; the offset stays"), here
    assert "    must hold then: 4 keys, positions 2 to 5; the next token has position 6" in lines[trim:chunk]
    assert "3. Chunk(3): 3 further tokens in one forward" in lines[trim:chunk]
    assert "    must hold then: 7 keys, positions 2 to 8; the next token has position 9" in lines[trim:chunk]
    picture = [line.strip() for line in lines if line.strip().startswith(("keys ", "mask "))]
    assert picture[:2] == ["keys #######", "mask #######!!   2 too wide"]
    assert lines[-1] == "Run it again: kv-harness replay X"


def test_a_wrong_mask_is_drawn_entry_by_entry() -> None:
    wrong = FakeTarget(bugs=frozenset({"mask leaks"}))
    program = Program((Prefill(3),))
    with pytest.raises(FindingError) as caught:
        judge_program(wrong, program, [properties.BY_ID["mask_shows_exactly_the_visible_set"]])
    lines = explained(record(execute(wrong, program), caught.value.finding, {}))
    at = next(number for number, line in enumerate(lines) if line.startswith("The mask of layer 1"))
    assert lines[at + 1 : at + 5] == [
        "    #X.",
        "    ##X",
        "    ###",
        "    # shown; . hidden; X shown, and must not be",
    ]


def test_a_program_without_a_finding() -> None:
    trace = record(execute(FakeTarget(), Program((Prefill(2), Decode(2)))), None, {})
    lines = explained(trace)
    assert "No finding was recorded: the program was right when this was written." in lines
    assert not [line for line in lines if "HERE" in line or "too wide" in line]
    assert [line for line in lines if line.startswith("    forward 2, ")]


def test_sinks_leave_a_gap_and_a_fork_holds_the_same() -> None:
    program = Program((Prefill(10), TrimFront(6, 3), Chunk(2), Fork(1)), ("pool", "pool"))
    lines = explained(record(execute(FakeTarget(), program), None, {}))
    held = "4 keys, positions 0 to 2 and 9; the next token has position 10"
    assert f"    sequence 0 must hold then: {held}" in lines
    held = "6 keys, positions 0 to 2 and 9 to 11; the next token has position 12"
    assert f"    sequence 0 must hold then: {held}" in lines
    assert f"    sequence 1 must hold then: the same, {held}" in lines


def test_a_message_cannot_pass_for_a_line_or_move_the_cursor() -> None:
    trace = of_bug()
    assert trace.finding is not None
    message = "x\x1b[2J\x07\nRun it again: something else"
    lines = explained(dataclasses.replace(trace, finding={**trace.finding, "message": message}))
    assert [line for line in lines if line.startswith("Run it again")] == ["Run it again: kv-harness replay X"]
    assert r"    But: x\x1b[2J\x07\nRun it again: something else" in lines


EVERY: list[Operation] = [
    Prefill(1),
    Prefill(9, media=(Media(2, 2, 3),)),
    Chunk(2),
    Decode(3),
    TrimFront(1),
    TrimFront(2, 3),
    EnforceMaxKvSize(4),
    EnforceMaxKvSize(4, "sinks"),
    EnforceMaxKvSize(4, "shift", 2),
    Rollback(1),
    Verify(3, 1),
    Snapshot(1),
    Restore(2),
    Fork(1),
    SaveLoad(),
    Reset(),
    QuantizeCache("int8"),
    Batch((0, 1)),
    BatchForward((1, 2)),
    BatchDecode(2),
]


def test_every_operation_has_words() -> None:
    from harness.reporting.explanation import _asked

    assert {type(operation) for operation in EVERY} == set(OPERATIONS)
    told = [_asked(operation) for operation in EVERY]
    assert len(set(told)) == len(told) and all(told)


def test_rows_of_a_batch_are_told_by_sequence() -> None:
    program = Program((Prefill(2), Prefill(3, 1), Batch((1, 0)), BatchDecode(2)), ("pool", "pool"))
    lines = explained(record(execute(FakeTarget(), program), None, {}))
    begun = lines[lines.index("4. BatchDecode(2): 2 forwards of one token for every row") :]
    assert [line.split(",")[0].strip() for line in begun if ", forward " in line and "over" in line] == [
        "sequence 1",
        "sequence 0",
        "sequence 1",
        "sequence 0",
    ]


def test_what_ended_before_and_who_owns() -> None:
    program = Program((Prefill(2), Decode(1, 1)), ("pool", "model"))
    whole = record(execute(FakeTarget(), program), None, {})
    lines = explained(dataclasses.replace(whole, steps=whole.steps[:1]))
    assert "    not run: the program had ended before" in lines
    assert [line for line in lines if line.startswith("Owned: ") and "sequence 1 by the model" in line]


@pytest.mark.parametrize("steps", [({},), ("x",), ({"before": {}, "after": 3},), ({"before": 1, "after": 1},)])
def test_steps_that_cannot_be_read(steps: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    odd = dataclasses.replace(record(execute(FakeTarget(), Program((Prefill(2),))), None, {}), steps=steps)
    with pytest.raises(TraceError, match="its steps cannot be read"):
        explained(odd)
    file = tmp_path / "odd.json"
    file.write_text(odd.to_text())
    assert cli.main(["explain", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"kv-harness: error: {file}: ") and err.count("\n") == 1


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a trace.json"
    file.write_text(of_bug().to_text())
    assert cli.main(["explain", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"Run it again: kv-harness replay '{file}'"
    assert cli.main(["explain", str(file), "--html", str(tmp_path / "." / "a trace.json")]) == 2
    assert "is the trace itself" in capsys.readouterr().err and json.loads(file.read_text())["format"]
    file.write_text(json.dumps({"format": "x"}))
    assert cli.main(["explain", str(file)]) == cli.main(["explain", str(tmp_path / "none.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_a_number_that_is_none_of_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = record(execute(FakeTarget(), Program((Prefill(2),))), None, {})
    steps = json.loads(json.dumps(whole.steps))
    steps[0]["after"]["held"] = [[0, 10**400]]
    file = tmp_path / "odd.json"
    file.write_text(dataclasses.replace(whole, steps=tuple(steps)).to_text())
    for more in ([], ["--html", str(tmp_path / "odd.html")]):
        assert cli.main(["explain", str(file), *more]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"kv-harness: error: {file}: ") and err.count("\n") == 1
