"""``kv-harness report``: all pages again, from the records alone, and an index over them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from harness.commands import UsageError, out_option

FOLDERS = ("families", "targets")
CHECKPOINTS = ("checkpoints",)
_WORST = ("FAIL", "INCONCLUSIVE", "VACUOUS", "PASS")


def register(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    report = commands.add_parser("report", help="make all pages of a folder of reports again, and its index")
    out_option(report)
    report.add_argument(
        "--merge",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="first take over the records, findings and history of this folder of reports; may be repeated",
    )
    report.add_argument("--history", action="store_true", help="add a line for every report that was made of shards")
    report.add_argument("--issue", type=Path, metavar="FILE", help="what is not PASS, as the text of an issue")
    report.set_defaults(act=_report)


def _report(arguments: argparse.Namespace) -> int:
    from harness.reporting import history as past
    from harness.reporting import html_page, write_atomically, write_pages
    from harness.reporting.grids import over_time
    from harness.reporting.history import FILE, OVER_TIME, HistoryError, checkpoints_table, index_markdown
    from harness.reporting.issue import issue_markdown
    from harness.reporting.text import escape

    out: Path = arguments.out
    for folder in (*arguments.merge, *([] if arguments.merge else [out])):
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder of reports")
    try:
        for other in arguments.merge:
            _take_over(out, other)
        whole = _put_together(out)
        matrix = _matrix(out, arguments.merge)
        history = past.merge(out / FILE, [other / FILE for other in arguments.merge])
        if arguments.history:
            history = past.add_new(out / FILE, whole)
        found = [(path, _read(path)) for path in _records(out, FOLDERS)]
        validated = [(path, _read(path)) for path in _records(out, CHECKPOINTS)]
        for path, record in (*found, *validated):
            write_pages(path, _markdown(record), record["findings"], out)
        text = index_markdown([record for _, record in found], _pages(found, out), history)
        if validated:
            those = checkpoints_table([record for _, record in validated], _pages(validated, out))
            text += f"\n## Checkpoints\n\n{those}\n"
        if matrix is not None:
            text += f"\n## Planted bugs\n\n{escape(matrix['summary']['text'])}: faults/kill-matrix.md\n"
        told = past.by_target(history)
        text += f"\n{past.properties_over_time(history)}" if told else ""
        grids = [grid for target, runs in told.items() if (grid := over_time(target, runs)) is not None]
        write_atomically(out / "index.md", text)
        write_atomically(out / "index.html", html_page(text, {OVER_TIME: grids}))
        if arguments.issue is not None:
            write_atomically(arguments.issue, issue_markdown([record for _, record in found]))
    except HistoryError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"cannot write reports: {error.filename or out}: {error.strerror or error}") from error
    print(text)
    for record in whole:
        if record["partial"]:
            print(f"{record['target']}: {record['verdict']}: {record['verdict_reason']}")
    print(f"reports: {len(found) + len(validated)}, runs: {len(history)}; index in {out / 'index.md'}")
    return 0


def _matrix(out: Path, others: Sequence[Path]) -> dict[str, Any] | None:
    """The kill matrices of these folders as one, written to ``out``; None where there is none. UsageError for a file
    that holds none, and for some that do not compare."""
    from harness.reporting.kill_matrix import NAME, matrix_markdown, merged, write_matrix

    records = []
    for path in (folder / "faults" / f"{NAME}.json" for folder in (out, *others)):
        if path.exists():
            try:
                records.append(json.loads(path.read_text(encoding="utf-8")))
                merged(records[-1:])
                matrix_markdown(records[-1])
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise UsageError(
                    f"{path}: no kill matrix ({type(error).__name__}: {error!s:.80}); remove it"
                ) from error
    if not records:
        return None
    try:
        record = merged(records)
    except ValueError as error:
        raise UsageError(str(error)) from error
    write_matrix(out / "faults", record)
    return record


def _pages(found: Sequence[tuple[Path, dict[str, Any]]], out: Path) -> list[str]:
    return [path.relative_to(out).with_suffix(".md").as_posix() for path, _ in found]


def _markdown(record: dict[str, Any]) -> str:
    from harness.reporting import family_markdown
    from harness.reporting.checkpoint import SCHEMA, checkpoint_markdown

    return checkpoint_markdown(record) if record.get("schema") == SCHEMA else family_markdown(record)


def _records(out: Path, folders: Sequence[str]) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((out / folder).glob("*.json"))


def _read(path: Path) -> dict[str, Any]:
    """A record. UsageError where it is none."""
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _markdown(record)
        for found in record["findings"]:
            found["replay"] is None or shlex.split(found["replay"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: no record of a report ({type(error).__name__}: {error!s:.80}); remove it") from error
    return record


def _take_over(out: Path, other: Path) -> None:
    """Records and findings of another folder. Of two records of one name the worse one stays: in whatever order folders
    are taken over, and however often, the result is the same."""
    from harness.reporting import replace, write_atomically

    for path in (*_records(other, (*FOLDERS, *CHECKPOINTS)), *_shards(other)):
        record, mine = _read(path), out / path.relative_to(other)
        if not mine.exists() or _rank(record) < _rank(_read(mine)):
            write_atomically(mine, path.read_text(encoding="utf-8"))
    for path in sorted((other / "findings").glob("*.json")):
        (out / "findings").mkdir(parents=True, exist_ok=True)
        replace(out / "findings" / path.name, partial(_copy, path))


def _put_together(out: Path) -> list[dict[str, Any]]:
    """Make a record of every run whose shards are there, in the place of an older one of shards, or of a better one of
    a whole run; returns them. UsageError where records in one folder are not shards of one run."""
    from harness.reporting import record_text, write_atomically
    from harness.reporting.shards import SHARDS, ShardError, whole_record

    made = []
    for folder in sorted({path.parent for path in _shards(out)}):
        try:
            record = whole_record([_read(path) for path in sorted(folder.glob("*.json"))])
        except (ShardError, KeyError) as error:
            raise UsageError(
                f"{folder}: its records are no shards of one run: {error}; remove the older ones"
            ) from error
        path = out / folder.relative_to(out / SHARDS)
        path = path.with_name(f"{path.name}.json")
        if not path.exists() or "shards" in (old := _read(path)) or _rank(record) < _rank(old):
            write_atomically(path, record_text(record))
            made.append(record)
    return made


def _shards(out: Path) -> list[Path]:
    from harness.reporting.shards import SHARDS

    return sorted(path for folder in FOLDERS for path in (out / SHARDS / folder).glob("*/*.json"))


def _copy(path: Path, file: BinaryIO) -> None:
    file.write(path.read_bytes())


def _rank(record: dict[str, Any]) -> tuple[int, int, str]:
    """Lower is kept: worse, then of more programs."""
    at = _WORST.index(record["verdict"]) if record["verdict"] in _WORST else len(_WORST)
    return at, -record.get("programs", 0), json.dumps(record, sort_keys=True)
