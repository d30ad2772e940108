"""A configuration in words, and lines that stay lines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def in_words(values: Mapping[str, Any], besides: Mapping[str, Any] | None = None) -> str:
    """A configuration on one line: ``num_hidden_layers=3 rope_scaling.mrope_section=2,1,1``. Inside a list of objects
    only what is set is named. ``besides``: leave out what is the same there."""
    same = dict(_flat(besides or {}, ""))
    told = [(name, value) for name, value in _flat(values, "") if name not in same or same[name] != value]
    return " ".join(f"{name}={_word(value)}" for name, value in told)


def plain(text: str) -> str:
    """A name, or a trace, may come from anybody: what moves a cursor, or looks like a line of ours, is shown as what it
    is, on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _word(value: Any) -> str:
    if not isinstance(value, (list, tuple)):
        return f"{value:g}" if isinstance(value, float) else str(value).lower()
    if not any(isinstance(item, Mapping) for item in value):
        return ",".join(_word(item) for item in value) or "none"
    parts = [[(name, set_to) for name, set_to in _flat(item, "") if set_to not in (None, False)] for item in value]
    return f"[{'; '.join(' '.join(n if v is True else f'{n}={_word(v)}' for n, v in part) for part in parts)}]"
