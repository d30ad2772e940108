"""Remembers finished steps beside the report, so that a run which was killed goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.reporting import write_atomically

_FIELDS = {"side", "program", "result"}
_RESULT = {"program", "properties", "findings", "forwards", "blind", "digests", "greedy", "stopped", "crash", "mask"}
Steps = dict[tuple[str, str], dict[str, Any]]


def key_of(decides: Mapping[str, Any]) -> str:
    """A digest of everything that decides the results (JSON-able)."""
    return hashlib.sha256(json.dumps(decides, sort_keys=True).encode()).hexdigest()


class Journal:
    """One JSON object a line: the key, then a step each. ``steps``: (side, program) -> result, of a run with the same
    key; a file with another key, or that cannot be read, counts as none. OSError where it cannot be written."""

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self.steps: Steps = {}
        first, *others = _lines(path) or [None]
        if first == {"key": key} and all(map(_is_step, others)):
            self.steps = {(line["side"], line["program"]): line["result"] for line in others}
        told = [{"key": key}, *(_line(*names, result) for names, result in self.steps.items())]
        write_atomically(path, "".join(json.dumps(line) + "\n" for line in told))  # without half a line at its end

    def add(self, side: str, program: str, result: Mapping[str, Any]) -> None:
        """A step is finished; on the disk when this returns."""
        self.steps[side, program] = dict(result)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_line(side, program, result)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def remove(self) -> None:
        """The report is written."""
        self._path.unlink(missing_ok=True)


def _line(side: str, program: str, result: Mapping[str, Any]) -> dict[str, Any]:
    return {"side": side, "program": program, "result": result}


def _is_step(line: object) -> bool:
    """Has it what a verdict is made of? Nobody edits the file, but a disk may."""
    if not isinstance(line, dict) or set(line) != _FIELDS or not isinstance(line["result"], dict):
        return False
    named = isinstance(line["side"], str) and isinstance(line["program"], str)
    return named and set(line["result"]) == _RESULT


def _lines(path: Path) -> list[Any]:
    """The whole lines of the file; a process that was killed may leave half of one at the end."""
    try:
        text = path.read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    except (OSError, ValueError):
        return []
