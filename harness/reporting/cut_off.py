"""Markers of runs that have not got to their end: what a kill leaves says so, and no older report speaks for it.

Beside the place of every report of a run lies ``NAME.partial``, a JSON object, from the start of the run until the
report is written. The older report goes when that one's turn comes; behind a kill it is missing, not wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.reporting.files import read_text, write_atomically

SUFFIX = "partial"
KINDS = ("json", "md", "html")
"""Of files of a report; the others are made from the first."""
_PLACES = ("families", "targets", "shards/families/*", "shards/targets/*")
_TOLD = ("profile", "seed", "policy", "since")
_MOST = 12  # names on a line


def announce(files: Mapping[Path, str], profile: str, seed: int, policy: str) -> None:
    """A run begins that is to write these reports: paths without a suffix, and the command that makes each. OSError."""
    since = datetime.now(UTC).isoformat(timespec="seconds")
    told = {"profile": profile, "seed": seed, "policy": policy, "since": since, "begun": False}
    for file, command in files.items():
        _mark(file, {"command": command, **told})


def begin(file: Path, whole: Path | None = None) -> None:
    """From now on there is no older report. ``whole``: of the shards that the one at ``file`` belongs to; it goes as
    well where it was put together of such and says PASS, for ``kv-harness report`` makes it again. OSError."""
    _remove(file)  # first: a marker that says begun, beside a report, is that of a report that was written
    if whole is not None and _passed_in_shards(whole):
        _remove(whole)
    _mark(file, {**_read(file), "begun": True})


def end(file: Path) -> None:
    """The report is written, or there is nothing to write."""
    _with(file, SUFFIX).unlink(missing_ok=True)


def forget(files: Sequence[Path]) -> None:
    """The run was refused: what has not begun leaves no trace."""
    for file in files:
        if not _read(file).get("begun"):
            end(file)


def cut_off(out: Path) -> list[str]:
    """A line for every run in this folder of reports that did not get to its end, with what is missing of it."""
    runs: dict[tuple[str, ...], tuple[list[str], list[str]]] = {}
    for marker in sorted(marker for place in _PLACES for marker in out.glob(f"{place}/*.{SUFFIX}")):
        file = marker.with_name(marker.name.removesuffix(f".{SUFFIX}"))
        read, there = _read(file), _with(file, "json").exists()
        if there and read.get("begun"):
            continue  # killed behind the last write
        run = tuple(" ".join(str(read.get(name, "unknown")).split()) for name in _TOLD)
        runs.setdefault(run, ([], []))[there].append(file.relative_to(out).as_posix())
    return [_line(dict(zip(_TOLD, run, strict=True)), *names) for run, names in runs.items()]


def _line(run: Mapping[str, str], missing: Sequence[str], older: Sequence[str]) -> str:
    said = [f"no report of {_some(missing)}"] if missing else []
    said += [f"not begun, what is there is of an earlier run: {_some(older)}"] if older else []
    which = f"profile {run['profile']}, seed {run['seed']}, policy {run['policy']}, since {run['since']}"
    return (
        f"a run was cut off, or still runs ({which}): {'; '.join(said)}; run it again, or remove these .{SUFFIX} files"
    )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return ", ".join(names[:_MOST]) + more


def _with(file: Path, suffix: str) -> Path:
    return file.with_name(f"{file.name}.{suffix}")


def _remove(file: Path) -> None:
    for kind in KINDS:
        _with(file, kind).unlink(missing_ok=True)


def _mark(file: Path, told: Mapping[str, Any]) -> None:
    write_atomically(_with(file, SUFFIX), json.dumps(told, indent=2) + "\n")


def _read(file: Path, suffix: str = SUFFIX) -> dict[str, Any]:
    """{} for what holds something else: that a marker is there says enough."""
    try:
        read = json.loads(read_text(_with(file, suffix)))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}


def _passed_in_shards(whole: Path) -> bool:
    record = _read(whole, "json")
    return "shards" in record and record.get("verdict") == "PASS"
