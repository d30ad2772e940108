"""``kv-harness report``: all pages again, from the records alone, and an index over them."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from harness.commands import UsageError, file_to_write, out_option

FOLDERS = ("families", "targets")
CHECKPOINTS = ("checkpoints",)
_NO_RECORD = (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What a file that holds something else raises as it is read, and as a page is made of it."""


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
    report.add_argument("--issue", type=file_to_write, metavar="FILE", help="what is not PASS, as the text of an issue")
    report.set_defaults(act=_report)


def _report(arguments: argparse.Namespace) -> int:
    from harness.reporting import history as past
    from harness.reporting import html_page, record_text, write_atomically, write_pages
    from harness.reporting.cut_off import cut_off
    from harness.reporting.grids import over_time
    from harness.reporting.history import FILE, OVER_TIME, HistoryError, checkpoints_table, index_markdown
    from harness.reporting.issue import issue_markdown
    from harness.reporting.kill_matrix import write_matrix
    from harness.reporting.text import escape, link

    out: Path = arguments.out
    for folder in (*arguments.merge, *([] if arguments.merge else [out])):
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder of reports")
    try:
        # All is read and compared before anything is written: an error leaves every file as it was.
        records = _gathered([out, *arguments.merge])
        whole = _put_together(records, out)
        matrix = _matrix(out, arguments.merge)
        for folder in (out, *arguments.merge):
            past.read(folder / FILE)
        for place, record in records.items():
            path, whole_text = out / place, record_text(record)
            if not path.exists() or path.read_text(encoding="utf-8") != whole_text:
                write_atomically(path, whole_text)
        for folder in arguments.merge:
            _take_findings(out, folder)
        if matrix is not None:
            write_matrix(out / "faults", matrix)
        history = past.merge(out / FILE, [other / FILE for other in arguments.merge])
        if arguments.history:
            history = past.add_new(out / FILE, whole)
        found, validated = (
            [(out / place, record) for place, record in sorted(records.items()) if place.parts[0] in folders]
            for folders in (FOLDERS, CHECKPOINTS)
        )
        for path, record in (*found, *validated):
            write_pages(path, _markdown(record), record, out)
        pages = _pages([*found, *validated], out)
        text = index_markdown([record for _, record in found], _pages(found, out), history)
        if validated:
            those = checkpoints_table([record for _, record in validated], _pages(validated, out))
            text += f"\n## Checkpoints\n\n{those}\n"
        if matrix is not None:
            text += f"\n## Planted bugs\n\n{escape(matrix['summary']['text'])}: {link('faults/kill-matrix.md')}\n"
            pages.append("faults/kill-matrix.md")
        cut = [line for folder in dict.fromkeys((out, *arguments.merge)) for line in cut_off(folder)]
        if cut:
            text += "\n## Cut off\n\n" + "".join(f"- {escape(line)}\n" for line in cut)
        told = past.by_target(history)
        text += f"\n{past.properties_over_time(history)}" if told else ""
        grids = [grid for target, runs in told.items() if (grid := over_time(target, runs)) is not None]
        write_atomically(out / "index.md", text)
        write_atomically(out / "index.html", html_page(text, {OVER_TIME: grids}, pages))
        if arguments.issue is not None:
            reports = [record for _, record in found]
            write_atomically(arguments.issue, issue_markdown(reports, past.without_report(reports, history)))
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
    """The kill matrices of these folders as one; None where there is none. UsageError for a file that holds none, and
    for one that does not compare with the first."""
    from harness.reporting.kill_matrix import NAME, checked, merged

    records: list[dict[str, Any]] = []
    for path in (folder / "faults" / f"{NAME}.json" for folder in (out, *others)):
        if not path.exists():
            continue
        try:
            records.append(checked(_loaded(path)))
        except _NO_RECORD as error:
            raise UsageError(f"{path}: no kill matrix ({_why(error)}); remove it") from error
        try:
            merged([records[0], records[-1]])
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
    return merged(records) if records else None


def _pages(found: Sequence[tuple[Path, dict[str, Any]]], out: Path) -> list[str]:
    return [path.relative_to(out).with_suffix(".md").as_posix() for path, _ in found]


def _markdown(record: dict[str, Any]) -> str:
    from harness.reporting import family_markdown
    from harness.reporting.checkpoint import SCHEMA, checkpoint_markdown

    return checkpoint_markdown(record) if record.get("schema") == SCHEMA else family_markdown(record)


def _loaded(path: Path) -> Any:
    """What the file holds. ValueError also for a number that JSON lacks."""
    from harness.reporting import read_text, record_text

    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from error
    record_text(data)
    return data


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error!s:.80}"


def _read(path: Path) -> dict[str, Any]:
    """A record. UsageError where it is none: all that is made of a record must come about."""
    from harness.reporting.history import checked, checkpoints_table, entry
    from harness.reporting.issue import issue_markdown
    from harness.reporting.masks import side_masks
    from harness.reporting.shards import whole_record

    try:
        record: dict[str, Any] = _loaded(path)
        _markdown(record).encode()
        for found in record["findings"]:
            found["replay"] is None or shlex.split(found["replay"])
        all(side_masks(record))
        if path.parent.name in CHECKPOINTS:
            checkpoints_table([record], [""])
        else:
            checked(entry(record, ""))
            issue_markdown([record])
        if "shards" in record:
            whole_record([record])
    except _NO_RECORD as error:
        raise UsageError(f"{path}: no record of a report ({_why(error)}); remove it") from error
    return record


def _gathered(folders: Sequence[Path]) -> dict[Path, dict[str, Any]]:
    """Every record of these folders by its place in them. Of two of one place see ``worse``: in whatever order, and
    however often, the result is the same. UsageError for a shard that two runs have."""
    from harness.reporting.shards import SHARDS, ShardError, check_same, worse

    records: dict[Path, dict[str, Any]] = {}
    for place in (folder / kind for folder in folders for kind in (*FOLDERS, *CHECKPOINTS)):
        if place.exists() and not place.is_dir():
            raise UsageError(f"{place}: is not a folder, and reports belong there; remove it")
    of: dict[Path, tuple[Path, dict[str, Any]]] = {}
    kinds = (*FOLDERS, *CHECKPOINTS, *(f"{SHARDS}/{kind}/*" for kind in FOLDERS))
    for folder in dict.fromkeys(folders):
        for path in sorted(path for kind in kinds for path in folder.glob(f"{kind}/*.json")):
            if not path.name.isprintable():  # nor is a name that is not UTF-8: no page could link to it
                raise UsageError(f"{str(path)!a}: a name that no page can hold; rename the file, or remove it")
            place, record = path.relative_to(folder), _read(path)
            first, one = of.setdefault(place.parent if place.parts[0] == SHARDS else place, (path, record))
            try:
                if place.parts[0] == SHARDS:
                    check_same(one, record)
                records[place] = worse(records[place], record) if place in records else record
            except ShardError as error:
                raise UsageError(f"{path} and {first}: no shards of one run: {error}; remove the older ones") from error
            except _NO_RECORD as error:
                raise UsageError(f"{path} and {first}: no records of one kind ({_why(error)})") from error
    return records


def _put_together(records: dict[Path, dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """Make a record of every run whose shards are there; returns these. It takes the place of one of a PASS, and of one
    of the same run with no more shards; of others the worse one stays. UsageError where these are no shards of one run.
    """
    from harness.reporting.shards import SHARDS, ShardError, covers, whole_record, worse

    made = []
    for folder in sorted({place.parent for place in records if place.parts[0] == SHARDS}):
        try:
            record = whole_record([each for place, each in sorted(records.items()) if place.parent == folder])
        except ShardError as error:
            raise UsageError(f"{out / folder}: no shards of one run: {error}; remove the older ones") from error
        except _NO_RECORD as error:
            raise UsageError(f"{out / folder}: no records of shards ({_why(error)}); remove them") from error
        made.append(record)
        place = folder.relative_to(SHARDS)
        place = place.with_name(f"{place.name}.json")
        old = records.get(place)
        if old is None or covers(record, old) or ("shards" in old and old["verdict"] == "PASS"):
            records[place] = record
            continue
        records[place] = worse(record, old)
        if record["verdict"] != records[place]["verdict"]:
            print(f"{place}: stays {old['verdict']}, its shards say {record['verdict']}; remove it where it is older")
    return made


def _take_findings(out: Path, other: Path) -> None:
    from harness.reporting import replace

    for path in sorted((other / "findings").glob("*.json")):
        (out / "findings").mkdir(parents=True, exist_ok=True)
        replace(out / "findings" / path.name, partial(_copy, path))


def _copy(path: Path, file: BinaryIO) -> None:
    file.write(path.read_bytes())
