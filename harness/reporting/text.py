"""Small pieces of Markdown that cannot be broken by what they hold."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from urllib.parse import quote

from tabulate import tabulate

_SPECIAL = re.compile(r"[\\`|*<]")
_BACKTICKS = re.compile(r"`+")


class Markdown(str):
    """Text that is Markdown already: a cell of a table takes it as it is."""

    __slots__ = ()


def escape(text: object) -> str:
    """``text`` on one line, shown as it is: for prose and for table cells, which ``|`` would end."""
    if isinstance(text, Markdown):
        return str(text)
    return _SPECIAL.sub(lambda match: "\\" + match.group(), " ".join(str(text).split()))


def link(page: str) -> Markdown:
    """To a page beside this one, by its relative path."""
    path = quote(page)
    return Markdown(f"[{path}]({path})")


def table(headers: Sequence[str], rows: Sequence[Sequence[object]], right: Collection[int] = ()) -> str:
    """A GitHub table; a cell that is no ``Markdown`` is escaped. ``right``: columns aligned to the right."""
    return tabulate(
        [[escape(cell) for cell in row] for row in rows],
        headers=[escape(header) for header in headers],
        tablefmt="github",
        disable_numparse=True,  # it would print 0.0e+00 as 0, and a version 2.10 as 2.1
        colalign=["right" if column in right else "left" for column in range(len(headers))],
    )


OPEN, CLOSE = "<details><summary>Standalone reproduction</summary>", "</details>"
"""Around what folds away. The one HTML of our Markdown: escaped text never has a line like these."""


def block(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    fence = "`" * max(3, 1 + max((len(run) for run in _BACKTICKS.findall(text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def code(text: object) -> str:
    """``text`` on one line as a code span: in an issue nothing in it is a link, a picture or a mention."""
    line = " ".join(str(text).split())
    if not line:
        return ""
    ticks = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(line)), default=0))
    room = " " if line[0] == "`" or line[-1] == "`" else ""
    return f"{ticks}{room}{line}{room}{ticks}"


def count(number: int, singular: str, plural: str | None = None) -> str:
    """``1 program``, ``3,912 programs``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def number(value: float | str | None) -> str:
    """A measured difference for a cell: ``-`` where none was measured."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.3g}"
