"""Minimal traces of known bugs, as files: each must still be what it was when it was found.

The offset mask of a family must still FAIL under its pin; the live mask, on the very same program, must be FIXED. To
add one, copy a file from ``reports/findings``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import properties
from harness.cli import main
from harness.execution import execute
from harness.recording import record
from harness.replay import Outcome, replay
from harness.targets.reference import FAMILIES, target_from_identity
from harness.trace import read_trace

PINS = sorted(Path(__file__).parent.glob("*.json"))


def test_every_family_has_a_pin() -> None:
    assert {str(read_trace(pin).target["family"]) for pin in PINS} == set(FAMILIES)


@pytest.mark.parametrize("pin", PINS, ids=lambda path: path.stem)
def test_a_pin_still_fails_in_the_same_words(pin: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(pin)
    target = target_from_identity(trace.target)
    result = replay(trace, target, properties.ALL)
    assert (result.outcome, result.same) == (Outcome.FAILED, True)
    assert trace.finding is not None and result.finding is not None
    assert result.finding.message == trace.finding["message"]
    assert main(["replay", str(pin)]) == 1
    assert capsys.readouterr().out.startswith("FAILED  mask_key_axis_equals_live_keys is still broken\n")


@pytest.mark.parametrize("pin", PINS, ids=lambda path: path.stem)
def test_the_live_mask_fixes_it(pin: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = read_trace(pin)
    fixed = dataclasses.replace(trace, target={**trace.target, "policy": "live"})
    path = tmp_path / "fixed.json"
    path.write_text(fixed.to_text())
    assert main(["replay", str(path)]) == 0
    assert capsys.readouterr().out.startswith("FIXED   mask_key_axis_equals_live_keys holds now")


@pytest.mark.parametrize("pin", PINS, ids=lambda path: path.stem)
def test_a_pin_records_what_still_happens(pin: Path) -> None:
    """The steps of the file (lengths, mask shapes, positions, errors) are those of today's run."""
    trace = read_trace(pin)
    today = record(execute(target_from_identity(trace.target), trace.program), None, {})
    assert today.steps == trace.steps
