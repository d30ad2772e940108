"""Bugs of released engines that the harness has found: one TOML file each, and beside it a program that shows the bug
with the library alone.

A reproduction ends with exit status 1 and one line that says what is wrong, and with 0 where the bug is not there.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class KnownFailure:
    """``id``: name of both files; ``library``: package; ``families``: model types of its targets; ``fails``: the
    property that does; ``versions``: releases in which the bug was seen; ``program``: the shrunk program that shows it;
    ``upstream``: a public report, "" if none is known; ``evidence``: what was looked at, and why it is a bug."""

    id: str
    title: str
    library: str
    families: tuple[str, ...]
    fails: str
    versions: tuple[str, ...]
    program: str
    upstream: str
    evidence: str

    @property
    def reproduction(self) -> Path:
        """The program that shows it."""
        return FOLDER / self.library.replace("-", "_") / f"{self.id}.py"


def known_failures() -> tuple[KnownFailure, ...]:
    """All of them, by library and id. Raises ValueError with one line for a file that lacks a field or has another."""
    return tuple(_read(path) for path in sorted(FOLDER.rglob("*.toml")))


def _read(path: Path) -> KnownFailure:
    data = tomllib.loads(path.read_text())
    names = {field.name for field in fields(KnownFailure)} - {"id"}
    if odd := sorted(names ^ set(data)):
        raise ValueError(f"{path.name}: the field {odd[0]} is {'missing' if odd[0] in names else 'unknown'}")
    lists = {name: tuple(data[name]) for name in ("families", "versions")}
    return KnownFailure(**data | {"id": path.stem} | lists)
