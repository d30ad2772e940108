"""Released engines with a bug that is known, beside the release that mended it: ``manifest.toml``.

The harness is told none of it: an ordinary campaign runs on each, and what it found is compared with what is known.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

MANIFEST = Path(__file__).parent / "manifest.toml"


class ManifestError(ValueError):
    """A manifest that cannot be used; the message is one line and names the entry."""


@dataclass(frozen=True)
class Other:
    """Another bug of the mended release: which ``properties`` fail by it, in ``families`` of the entry, and ``why``.
    ``says``: a pattern (of ``re``) that their messages hold, so that a finding in other words is one of its own;
    ``programs``: one that the shrunk program holds, "" where any program shows it."""

    properties: tuple[str, ...]
    families: tuple[str, ...]
    says: str
    why: str
    programs: str = ""

    def explains(self, family: str, name: str, message: str, program: str) -> bool:
        """Is this finding of a property by this bug?"""
        named = family in self.families and name in self.properties
        return named and all(re.search(*pair) for pair in ((self.says, message), (self.programs, program)))


@dataclass(frozen=True)
class Exhibit:
    """One bug. ``package``: on PyPI; ``buggy``, ``fixed``: its releases that run; ``beside``: requirements that are
    installed with each; ``bare``: the release itself comes without what it asks for, since all that a campaign needs of
    that is in ``beside``; ``families``: as a target names them, a model type or its path with images; ``report``: the
    public one, ``owner/repository#number``; ``expected``: properties of which one must find it, in words that hold
    ``says``; ``others``: bugs that are no news; ``checked``: what was compared to know that what is found is this
    bug."""

    name: str
    package: str
    buggy: tuple[str, ...]
    fixed: str
    families: tuple[str, ...]
    report: str
    expected: tuple[str, ...]
    says: str
    checked: str
    beside: tuple[str, ...]
    others: tuple[Other, ...] = ()
    bare: bool = False

    @property
    def kind(self) -> str:
        """Of the targets that its releases are: ``mlx_lm``."""
        return self.package.replace("-", "_")

    def installs(self, version: str) -> tuple[tuple[str, ...], ...]:
        """Arguments of ``pip install`` for a release, one command after the other."""
        release = f"{self.package}=={version}"
        return (self.beside, ("--no-deps", release)) if self.bare else ((release, *self.beside),)


def exhibits(path: Path = MANIFEST) -> tuple[Exhibit, ...]:
    """All of a manifest, in its order. Raises ManifestError."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path}: {error}") from error
    shared = tuple(data.pop("beside", ()))
    return tuple(_exhibit(name, table, shared) for name, table in data.items())


_LISTS = ("buggy", "families", "expected", "beside")


def _exhibit(name: str, table: Any, shared: tuple[str, ...]) -> Exhibit:
    if not isinstance(table, dict):
        raise ManifestError(f"{name}: it is no table")
    names = {field.name for field in fields(Exhibit)} - {"name"}
    given = {"beside": list(shared), "others": [], "bare": False, **table}
    if odd := sorted(names ^ set(given)):
        raise ManifestError(f"{name}: the field {odd[0]} is {'missing' if odd[0] in names else 'unknown'}")
    for field, value in given.items():
        if field in _LISTS:
            good = _texts(value)
        elif field == "bare":
            good = isinstance(value, bool)
        elif field == "others":
            good = isinstance(value, list) and all(_is_other(each, given["families"]) for each in value)
        else:
            good = isinstance(value, str) and bool(value.strip())
        if not good:
            raise ManifestError(f"{name}: the field {field} is {value!r:.60}")
    lists = {field: tuple(given[field]) for field in _LISTS}
    tuples = ({key: tuple(each[key]) for key in _OF_OTHERS} for each in given["others"])
    others = tuple(Other(**each | made) for each, made in zip(given["others"], tuples, strict=True))
    return Exhibit(name, **given | lists | {"others": others})


_OF_OTHERS = ("properties", "families")


def _is_other(value: Any, families: Any) -> bool:
    """Is it whole, of families of its entry, and are its patterns such that they leave something out?"""
    if not isinstance(value, dict) or {"programs", *value} != {field.name for field in fields(Other)}:
        return False
    patterns = [value["says"], value.get("programs", "Batch")]
    if not all(_texts(value[key]) for key in _OF_OTHERS) or not _texts([*patterns, value["why"]]):
        return False
    return set(value["families"]) <= set(families) and all(map(_tells_apart, patterns))


def _tells_apart(pattern: str) -> bool:
    try:
        return re.search(pattern, "") is None
    except re.error:
        return False


def _texts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value)
