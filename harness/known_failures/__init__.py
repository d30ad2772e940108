"""Bugs of released engines that the harness has found: one TOML file each, and beside it a program that shows the bug
with the library alone.

A reproduction ends with exit status 1 and one line that says what is wrong, and with 0 where the bug is not there.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Found:
    """What is known of a finding: the ``library`` (package) and its installed ``version``, the model type, what stands
    behind every @ of its target, the property, its message, the codes of the operations of its program, and the states
    that this comes to (``known_states``)."""

    library: str
    version: str
    family: str
    caches: tuple[str, ...]
    property_id: str
    message: str
    operations: tuple[str, ...]
    states: frozenset[str]


@dataclass(frozen=True)
class KnownFailure:
    """``id``: name of both files; ``library``: package; ``families``: model types of its targets; ``fails``: the
    property that does, and then its ``message``, a regular expression, where that tells it from others; ``also``:
    properties that it was seen to break by what follows from it, under the same conditions but for the message, which
    is of ``fails``; ``caches``: how begins what stands behind each @ of targets that show it, ``operations``: one of
    these is in every program that does (codes; both empty where any may); ``states``: all of these are come to by every
    program that does; ``versions``: releases in which the bug was
    seen; ``program``: the shrunk program that shows it; ``upstream``: a public report, "" if none is known;
    ``evidence``: what was looked at, and why it is a bug."""

    id: str
    title: str
    library: str
    families: tuple[str, ...]
    fails: str
    versions: tuple[str, ...]
    program: str
    upstream: str
    evidence: str
    caches: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    message: str = ""
    also: tuple[str, ...] = ()

    def matches(self, found: Found) -> str | None:
        """By what a finding is taken for this bug, in words; None where it is another one, for all that is recorded."""
        if found.property_id not in (self.fails, *self.also) or found.family not in self.families:
            return None
        if self.library != found.library or found.version not in self.versions:
            return None
        if not all(any(given.startswith(each) for given in found.caches) for each in self.caches):
            return None
        if self.operations and not set(self.operations) & set(found.operations):
            return None
        if not set(self.states) <= found.states:
            return None
        follows = found.property_id != self.fails
        if self.message and not follows and re.search(self.message, found.message) is None:
            return None
        told = ["what follows from it" if follows else "property", "family", f"{self.library} {found.version}"]
        told += [f"caches @{'@'.join(self.caches)}"] if self.caches else []
        told += [f"operation {' or '.join(self.operations)}"] if self.operations else []
        told += [f"{' and '.join(self.states)}"] if self.states else []
        return ", ".join(told + ["message"] * bool(self.message and not follows))

    @property
    def reproduction(self) -> Path:
        """The program that shows it."""
        return FOLDER / self.library.replace("-", "_") / f"{self.id}.py"


def known_failures() -> tuple[KnownFailure, ...]:
    """All of them, by library and id. Raises ValueError with one line for a file that lacks a field or has another."""
    return tuple(_read(path) for path in sorted(FOLDER.rglob("*.toml")))


def record_of(found: Found) -> tuple[KnownFailure, str] | None:
    """The record that a finding matches, the one that says most of those that do, and by what; None where none does.
    Where it only follows from a bug, and may follow from another one as well, that is told."""
    matching = [(each, told) for each in _all() if (told := each.matches(found)) is not None]
    best = max(matching, key=lambda pair: (pair[0].fails == found.property_id, len(pair[1])), default=None)
    if best is None or best[0].fails == found.property_id:
        return best
    others = [each.id for each, _ in matching if each is not best[0]]
    return best[0], best[1] + (f" (or it follows from {' or '.join(others)})" if others else "")


@functools.cache
def _all() -> tuple[KnownFailure, ...]:
    return known_failures()


def _read(path: Path) -> KnownFailure:
    data = tomllib.loads(path.read_text())
    names = {field.name for field in fields(KnownFailure)} - {"id"}
    optional = {"caches", "operations", "states", "message", "also"}
    if odd := sorted((names - optional - set(data)) | (set(data) - names)):
        raise ValueError(f"{path.name}: the field {odd[0]} is {'missing' if odd[0] in names else 'unknown'}")
    lists = {
        name: tuple(data.get(name, ())) for name in ("families", "versions", "caches", "operations", "states", "also")
    }
    try:
        re.compile(data.get("message", ""))
    except re.error as error:
        raise ValueError(f"{path.name}: the field message is no regular expression: {error}") from error
    return KnownFailure(**data | {"id": path.stem} | lists)
