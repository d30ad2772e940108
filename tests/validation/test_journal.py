"""A validation that is killed leaves nothing that looks like a report, and the next one goes on behind it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from harness.cli import main
from harness.validation.journal import _RESULT, Journal, key_of
from tests.validation.conftest import SMALL, Synth

RESULT: dict[str, object] = dict.fromkeys(_RESULT)
OPTIONS = (*SMALL[:4], "--tokens", "120", "--decode", "12")


def test_kill_9_in_the_middle_and_resume(synth: Synth, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, out = synth("qwen2_vl"), tmp_path / "reports"
    command = [sys.executable, "-m", "harness.cli", "validate", str(folder), *OPTIONS, "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ))
    try:
        deadline = time.monotonic() + 120
        while not (partial := _partial(out)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.005)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL, "it ended before a step was in the journal"
    assert [path.name for path in (out / "checkpoints").iterdir()] == [partial[0].name]
    with partial[0].open("a") as file:
        file.write('{"side": "after", "prog')  # as a process leaves it that dies while it writes

    assert main([*command[3:]]) == 0
    said = capsys.readouterr().err
    assert "goes on behind" in said and "after/untrimmed" in said.split("goes on behind")[1].splitlines()[0]
    assert "after/untrimmed: " not in said  # it is not measured again
    resumed = _report(out)
    assert not _partial(out)

    assert main([*command[3:-1], str(tmp_path / "whole")]) == 0
    assert "goes on behind" not in capsys.readouterr().err
    assert resumed | {"written": None} == _report(tmp_path / "whole") | {"written": None}


def _partial(out: Path) -> list[Path]:
    """The journal, once it holds a finished step."""
    return [path for path in out.glob("checkpoints/*.partial.jsonl") if path.read_text().count("\n") > 1]


def _report(out: Path) -> dict[str, object]:
    (file,) = out.glob("checkpoints/*.json")
    data: dict[str, object] = json.loads(file.read_text())
    return data


def test_another_key_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.partial.jsonl"
    journal = Journal(path, "one")
    journal.add("after", "bounded", RESULT)
    assert Journal(path, "one").steps == {("after", "bounded"): RESULT}
    assert Journal(path, "two").steps == {}
    assert Journal(path, "one").steps == {}  # and what was there is gone
    journal.remove()
    assert not path.exists()


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe\n", b"[]\n", b"not JSON\n", b'{"key": "one"}\n{"side": 1}\n', b"7\n8\n"]
)
def test_a_file_that_is_no_journal_counts_as_none(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    path.write_bytes(content)
    assert Journal(path, "one").steps == {}


def test_half_a_line_is_dropped_and_does_not_spoil_the_next(tmp_path: Path) -> None:
    path = tmp_path / "x.partial.jsonl"
    Journal(path, "one").add("after", "bounded", RESULT)
    path.write_text(path.read_text() + '{"side": "after", "program": "ima')
    Journal(path, "one").add("after", "images", RESULT)
    assert list(Journal(path, "one").steps) == [("after", "bounded"), ("after", "images")]


def test_the_key_depends_on_everything_that_it_is_given() -> None:
    one = {"versions": {"mlx": "1"}, "fingerprint": "a", "programs": [1]}
    others = [one | {"versions": {"mlx": "2"}}, one | {"fingerprint": "b"}, one | {"programs": [2]}]
    assert len({key_of(each) for each in (one, *others)}) == 4
    assert key_of(one) == key_of(dict(reversed(one.items())))
