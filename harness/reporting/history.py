"""What became of every target over many runs: a line of JSON for each, and the index page made from them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.findings import Verdict
from harness.reporting.files import read_text, write_atomically
from harness.reporting.grids import MOST_RUNS
from harness.reporting.text import escape, link, table

FILE = "history.jsonl"
BAD = ("FAIL", "KNOWN", "INCONCLUSIVE", "VACUOUS")
_BARS = "▁▂▃▄▅▆▇█"
_TREND = 12  # runs that a trend shows
_HEADERS = (
    *("target", "verdict", "last good", "first bad since", "runs", "programs", "programs/s", "decisive", "report"),
)

Entry = dict[str, Any]


class HistoryError(ValueError):
    """A file that is no history; one line, naming file and line."""


def entry(record: Mapping[str, Any], at: str) -> Entry:
    """The line of a run. ``at``: when it ended, in UTC (ISO 8601)."""
    return {
        "at": at,
        "target": record["target"],
        "policy": record["policy"],
        "profile": record["profile"],
        "seed": record["seed"],
        "verdict": record["verdict"],
        "partial": record["partial"],
        "programs": record["programs"],
        "seconds": record["seconds"],
        "decisive_steps": sum(row["decisive_steps"] for row in record["properties"]),
        "broken": list(dict.fromkeys(row["property"] for row in record["findings"])),
        "verdicts": {row["id"]: row["verdict"] for row in record["properties"]},
        "versions": {name: record["versions"][name] for name in ("kv-harness", "mlx") if name in record["versions"]},
    }


def read(file: Path) -> list[Entry]:
    """Every entry, oldest first. A last line without an end is one that somebody was writing: it is left out.
    HistoryError for anything else that is no entry; [] where there is no file."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise HistoryError(f"{file}: cannot be read ({error})") from error
    lines = text.split("\n")[:-1]
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(checked(json.loads(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise HistoryError(f"{file}: line {number} is no entry ({error!r:.80}); remove it") from error
    return sorted(entries, key=_order)


_MOST = 10**15
_WORDS = tuple(verdict.value for verdict in Verdict)
_NAMES = (
    *("at", "target", "policy", "profile", "seed", "verdict", "partial"),
    *("programs", "seconds", "decisive_steps", "broken", "verdicts", "versions"),
)


def checked(one: Any) -> Entry:
    """An entry. ValueError, KeyError or TypeError where a field is missing, or is not what it should be."""
    made = {name: one[name] for name in _NAMES if name != "verdicts"} | {"verdicts": one.get("verdicts", {})}
    texts = all(isinstance(made[name], str) for name in ("at", "target", "policy", "profile", "verdict"))
    whole = all(type(made[name]) is int and 0 <= made[name] <= _MOST for name in ("seed", "programs", "decisive_steps"))
    seconds = type(made["seconds"]) in (int, float) and (made["seconds"] == 0 or 1e-3 <= made["seconds"] <= _MOST)
    broken = isinstance(made["broken"], list) and all(isinstance(name, str) for name in made["broken"])
    told = made["verdicts"]
    verdicts = isinstance(told, dict) and all(word in _WORDS for word in told.values())
    verdicts = verdicts and made["verdict"] in ("PASS", *BAD)
    if not (texts and whole and seconds and broken and verdicts and type(made["partial"]) is bool):
        raise TypeError("a field is not of its type")
    _line(made)
    json.dumps(made, ensure_ascii=False).encode()  # or no page could hold it
    return made


def without_report(records: Sequence[Mapping[str, Any]], history: Sequence[Entry]) -> list[str]:
    """The targets that history knows and of which no report is there."""
    known = {(record["target"], record["policy"]) for record in records}
    gone = [(one["target"], one["policy"]) for one in history if (one["target"], one["policy"]) not in known]
    return [_label(*name) for name in dict.fromkeys(gone)]


def append(file: Path, entries: Iterable[Entry]) -> None:
    """Add lines in one write. A half line that an interrupt left is ended first, so that nothing is glued to it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(_line(one) for one in entries)
    with file.open("a+b") as opened:
        size = opened.seek(0, os.SEEK_END)
        if size:
            opened.seek(size - 1)
            if opened.read(1) != b"\n":
                kept = file.read_bytes()
                opened.truncate(kept.rfind(b"\n") + 1)
        opened.write(lines.encode())
        opened.flush()
        os.fsync(opened.fileno())


def add_new(file: Path, records: Iterable[Mapping[str, Any]]) -> list[Entry]:
    """Add a line for each of these records of which there is none yet, whenever it was written: once more changes
    nothing. Raises as ``read``; returns all entries."""
    at = datetime.now(UTC).isoformat(timespec="seconds")
    known = {_line({**one, "at": ""}) for one in read(file)}
    append(file, [one for record in records if _line({**(one := entry(record, at)), "at": ""}) not in known])
    return read(file)


def merge(file: Path, others: Iterable[Path]) -> list[Entry]:
    """Put the lines of all these files into ``file``, each once, oldest first: in whatever order and however often this
    is done, the file is the same. Raises as ``read``; returns the entries."""
    known = {_line(one): one for source in (file, *others) for one in read(source)}
    entries = sorted(known.values(), key=_order)
    write_atomically(file, "".join(map(_line, entries)))
    return entries


def _line(one: Entry) -> str:
    return json.dumps({name: one[name] for name in _NAMES}, allow_nan=False, sort_keys=True) + "\n"


def _order(one: Entry) -> tuple[str, str]:
    return one["at"], _line(one)


def checkpoints_table(records: Sequence[Mapping[str, Any]], pages: Sequence[str]) -> str:
    """A row for every validation that is there. KeyError and TypeError where a record is none."""
    rows = [
        (
            record["checkpoint"]["name"],
            record["checkpoint"]["family"],
            record["verdict"],
            "P={max_kv_size} C={prefill_chunk_size} N={tokens} K={decode}".format_map(record["plan"]),
            f"{_engine(record)}, {record['dtype']} on {record['device']}, seed {record['seed']}",
            ", ".join(_side(record, side) for side in record["sides"] if side != "control"),
            link(page),
        )
        for record, page in zip(records, pages, strict=True)
    ]
    headers = ("checkpoint", "family", "verdict", "as a server with", "run by", "mask policies", "report")
    return table(headers, rows)


def _engine(record: Mapping[str, Any]) -> str:
    return str(record["engine"]["name"]) if "engine" in record else "reference"


def _side(record: Mapping[str, Any], side: str) -> str:
    """Its mask policy, and its engine where that is not the judged one."""
    other = f" {record['before_engine']['name']}" if side == "before" and "before_engine" in record else ""
    return f"{side}{other} {record['sides'][side]}"


def index_markdown(records: Sequence[Mapping[str, Any]], pages: Sequence[str], history: Sequence[Entry]) -> str:
    """A row for every report that is there (``pages``: where it lies), and for every target that only history knows."""
    rows = []
    known = {(str(record["target"]), str(record["policy"])): page for record, page in zip(records, pages, strict=True)}
    past: dict[tuple[str, str], list[Entry]] = {name: [] for name in known}
    for one in history:
        past.setdefault((one["target"], one["policy"]), []).append(one)
    now = {(str(record["target"]), str(record["policy"])): record for record in records}
    for name, runs in past.items():
        target, policy = name
        whole = [one for one in runs if not one["partial"]]
        good = next((one for one in reversed(whole) if one["verdict"] == "PASS"), None)
        told = [one for one in runs if not one["partial"] or one["verdict"] == "FAIL"]
        since = told if good is None else told[told.index(good) + 1 :]
        bad = next((one for one in since if one["verdict"] in BAD), None)
        speeds = [one["programs"] / one["seconds"] for one in whole if one["seconds"]]
        rows.append(
            (
                _label(target, policy),
                now[name]["verdict"] if name in now else "no report",
                "-" if good is None else _when(good),
                "-" if bad is None else f"{_when(bad)}: {', '.join(bad['broken']) or bad['verdict']}",
                f"{len(runs):,}",
                f"{sum(one['programs'] for one in runs):,}",
                _trend(speeds, "{:.1f}"),
                _trend([one["decisive_steps"] for one in whole], "{:,}"),
                link(known[name]) if name in known else "-",
            )
        )
    about = (
        "last good: the newest whole run that passed; first bad since: the first one behind it that did not, or "
        f"an interrupted one that FAILs. Bars are "
        f"the last {_TREND} whole runs, the number the newest. Speeds of different machines do not compare."
    )
    return "\n\n".join(("# Reports", table(_HEADERS, rows, right={4, 5}) if rows else "None yet.", about)) + "\n"


OVER_TIME = "Properties over time"  # the heading below which a page has its pictures
_LETTERS = {"PASS": "P", "FAIL": "F", "KNOWN": "K", "VACUOUS": "V", "INCONCLUSIVE": "I", "NOT APPLICABLE": "-"}


def by_target(history: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The runs of every target that say what became of its properties, oldest first."""
    found: dict[str, list[Entry]] = {}
    for one in history:
        if one["verdicts"]:
            found.setdefault(_label(one["target"], one["policy"]), []).append(one)
    return found


def properties_over_time(history: Sequence[Entry]) -> str:
    """A section: every property that did not pass each of the last runs of a target, a letter for each of these."""
    rows = []
    for target, runs in by_target(history).items():
        last = runs[-MOST_RUNS:]
        for name in sorted({name for one in last for name in one["verdicts"]}):
            letters = "".join(_LETTERS.get(one["verdicts"].get(name, ""), ".") for one in last)
            if set(letters) - set("P-."):
                rows.append((target, name, letters))
    told = (
        table(("target", "property", f"last {MOST_RUNS} runs, oldest first"), rows)
        + "\n\nP: PASS, F: FAIL, K: KNOWN, V: VACUOUS, I: INCONCLUSIVE, -: NOT APPLICABLE, a dot: not asked. "
        "Others passed."
        if rows
        else "Every property that can be judged passed in every run."
    )
    return f"## {OVER_TIME}\n\n{told}\n"


def _label(target: str, policy: str) -> str:
    return target + ("" if policy == "live" else f" ({policy} mask)")


def _when(one: Entry) -> str:
    return f"{one['at'][:10]}, seed {one['seed']}"


def _trend(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    last = values[-_TREND:]
    most = max(last) or 1
    bars = "".join(_BARS[min(int(value / most * len(_BARS)), len(_BARS) - 1)] for value in last)
    return f"{bars} {escape(form.format(values[-1]))}"
