"""Traces: a program, the target it ran on and what was seen, as versioned JSON.

A trace file is untrusted input.  Reading one either gives a Trace that is whole and unaltered (its fingerprint fits)
or raises a TraceError of one line that names the file and what is wrong.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from harness.operations import Program

FORMAT = "kv-harness-trace"
VERSION = 1
MAX_BYTES = 64 << 20

_FIELDS = ("format", "version", "fingerprint", "target", "program", "finding", "steps", "versions")
_FINDING_FIELDS = ("property", "step", "message", "reproducible")


class TraceError(ValueError):
    """A trace file that cannot be used; one line, naming the file."""


@dataclass(frozen=True)
class Trace:
    """``target``: the identity that rebuilds the target. ``finding``: property, step and message, or None. ``steps``:
    what each operation did (see ``harness.recording``). ``versions``: of the packages when it was recorded; they do
    not count in the fingerprint."""

    target: dict[str, Any]
    program: Program
    finding: dict[str, Any] | None
    steps: tuple[dict[str, Any], ...]
    versions: dict[str, str]

    @property
    def fingerprint(self) -> str:
        """sha256 over everything but the versions, in canonical JSON."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "target": self.target,
            "program": self.program.to_json(),
            "finding": self.finding,
            "steps": list(self.steps),
        }
        return hashlib.sha256(_canonical(body).encode()).hexdigest()

    @property
    def file_name(self) -> str:
        """``mask_key_axis-3f2a9c11.json``: the start of the property's name and of the fingerprint; of a drawn variant
        ``mask_key_axis-drawn-1-3f2a9c11.json``."""
        name = "trace" if self.finding is None else "_".join(str(self.finding["property"]).split("_")[:3])
        if "drawn" in self.target:
            name += "-" + re.sub(r"[^a-z0-9]+", "-", str(self.target.get("variant"))[:40])
        return f"{name}-{self.fingerprint[:8]}.json"

    def bare(self) -> Trace:
        """The shortest trace that replays as this one does: without what was seen, in numbers and in words."""
        finding = None if self.finding is None else {**self.finding, "message": ""}
        return dataclasses.replace(self, finding=finding, steps=(), versions={})

    def to_text(self) -> str:
        """The file's content, ending in a newline."""
        return json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"

    def to_json(self) -> dict[str, Any]:
        """The same as an object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "target": self.target,
            "program": self.program.to_json(),
            "finding": self.finding,
            "steps": list(self.steps),
            "versions": self.versions,
        }


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_trace(path: Path) -> Trace:
    """Read and check a trace file. Raises TraceError."""

    def refuse(why: str) -> NoReturn:
        raise TraceError(f"{path}: {' '.join(why.split())}")

    try:
        if not path.exists():
            refuse("no such file")
        if not path.is_file():
            refuse("not a regular file; give the .json file that a report names")
        if path.stat().st_size > MAX_BYTES:
            refuse(f"larger than {MAX_BYTES >> 20} MiB, no trace is")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        refuse(f"cannot be read ({error.strerror or error})")
    except (UnicodeDecodeError, ValueError) as error:
        if isinstance(error, TraceError):
            raise
        refuse("not text; a trace is a JSON file")
    try:
        data = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except json.JSONDecodeError as error:
        refuse(f"not JSON, or cut off (line {error.lineno}, column {error.colno}: {error.msg})")
    except RecursionError:
        refuse("nested too deeply, no trace is")
    except ValueError as error:
        refuse(str(error))
    try:
        return _checked(data)
    except ValueError as error:  # TraceError, OperationError, and what canonical JSON refuses (1e999 reads as inf)
        refuse(str(error))
    except RecursionError:
        refuse("nested too deeply, no trace is")


def _checked(data: object) -> Trace:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise TraceError(f'not a trace of this harness (it has no "format": "{FORMAT}")')
    version = data.get("version")
    if type(version) is not int:
        raise TraceError(f"the version must be a whole number, got {version!r:.40}")
    if version > VERSION:
        raise TraceError(
            f"written by a newer harness (trace version {version!r:.60}, this one reads {VERSION}); upgrade it"
        )
    if version < 1:
        raise TraceError(f"there is no trace version {version!r:.60}")
    if set(data) != set(_FIELDS):
        odd = sorted(set(data) ^ set(_FIELDS))
        raise TraceError(f"field {odd[0]!r:.60} is {'missing' if odd[0] in _FIELDS else 'unknown'}")
    if not isinstance(data["target"], dict) or not isinstance(data["versions"], dict):
        raise TraceError("'target' and 'versions' must be objects")
    if not isinstance(data["steps"], list) or not all(isinstance(step, dict) for step in data["steps"]):
        raise TraceError("'steps' must be a list of objects")
    finding = data["finding"]
    if finding is not None:
        if not isinstance(finding, dict) or set(finding) != set(_FINDING_FIELDS):
            raise TraceError(f"'finding' must be null or an object with {', '.join(_FINDING_FIELDS)}")
        if not isinstance(finding["property"], str) or not isinstance(finding["message"], str):
            raise TraceError("a finding's 'property' and 'message' must be text")
        if not isinstance(finding["reproducible"], bool):
            raise TraceError("a finding's 'reproducible' must be true or false")
        step = finding["step"]
        if step is not None and (type(step) is not int or step < 0):
            raise TraceError(f"a finding's 'step' must be null or the index of an operation, got {step!r:.60}")
    program = Program.from_json(data["program"])
    if not program.operations:
        raise TraceError("its program has no operation: there is nothing to replay")
    if finding is not None and finding["step"] is not None and finding["step"] >= len(program.operations):
        raise TraceError(f"its finding names step {finding['step']!r:.40}, the program has {len(program.operations)}")
    trace = Trace(data["target"], program, finding, tuple(data["steps"]), data["versions"])
    if data["fingerprint"] != trace.fingerprint:
        raise TraceError(
            f"its content does not fit its fingerprint (corrupt, or edited by hand; if you meant to edit it, set the "
            f"fingerprint to {trace.fingerprint})"
        )
    return trace


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r:.60} stands twice in one object")
        result[key] = value
    return result
