"""The README says what the code says: its list of properties, its commands, its words for operations."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path

import pytest

import properties
from harness.cli import build_parser
from harness.operations import OPERATIONS
from harness.profiles import PROFILES

README_FILE = Path(__file__).parent.parent / "README.md"
README = README_FILE.read_text(encoding="utf-8")


def subcommands() -> dict[str, argparse.ArgumentParser]:
    (commands,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(commands.choices)


def test_the_list_of_properties_is_that_of_the_code() -> None:
    listed = [
        line for line in README.splitlines() if line.startswith("- `") and "` : " not in line and "Decisive: " in line
    ]
    assert listed == [f"- `{p.id}`: {p.sentence} Decisive: {p.decisive_when}." for p in properties.ALL]


@pytest.mark.parametrize("name", subcommands())
def test_every_command_and_option_is_shown(name: str) -> None:
    lines = README.split("## Commands", 1)[1].split("```")[1].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"kv-harness {name}"))
    text = lines[start]
    for line in lines[start + 1 :]:
        if not line.startswith(" "):
            break
        text += line
    for action in subcommands()[name]._actions:
        for option in action.option_strings:
            if option.startswith("--") and option not in ("--help", "--no-strict"):
                assert option in text, option


def test_a_newcomer_is_told_the_shortest_way_first() -> None:
    """An install and a second, before what takes minutes; and words before they are used without an explanation."""
    first, second = README.split("```")[1].splitlines()[1:3]
    assert first.startswith("pip install -e . && kv-harness doctor") and "--profile smoke" in second
    assert README.index(first) < README.index("make run") < README.index("(a *front trim*: the oldest keys go")
    assert README.index("`@live-window` behind the name, on caches of ours") < README.index("llama@live-window")


def test_every_profile_is_named() -> None:
    assert "|".join(PROFILES) in README and all(f"`{name}`" in README for name in PROFILES)


def test_the_table_of_operations_is_that_of_the_code() -> None:
    """Who edits a trace has nothing else to go by."""
    text = (README_FILE.parent / "reports" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+)` \| (.*) \|$", text, re.MULTILINE)[1:]  # behind the heading
    written = {code: dict(re.findall(r"`([a-z_]+)`(?: \(([^)]*)\))?", fields)) for code, fields in rows}
    assert written == {kind.code: {f.name: _default(f) for f in dataclasses.fields(kind)} for kind in OPERATIONS}


def _default(field: dataclasses.Field[object]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    return "none" if field.default == () else str(field.default)
