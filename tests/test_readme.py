"""The README says what the code says: its list of properties, its commands, its words for operations."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

import properties
from harness.cli import build_parser
from harness.profiles import PROFILES

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


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


def test_every_profile_is_named() -> None:
    assert "|".join(PROFILES) in README and all(f"`{name}`" in README for name in PROFILES)
