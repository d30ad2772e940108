"""Public reports that planted bugs are modelled on, as links."""

from __future__ import annotations

import re

from harness.reporting.text import Markdown, escape

OURS = "ours"
"""In the place of a report, where a bug is modelled on none."""
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
SOURCE = re.compile(rf"(?P<repository>{_NAME}/{_NAME})#(?P<number>[1-9]\d*)(?: \((?P<note>.+)\))?")
"""``owner/name#number``, and in brackets what that report shows, or in what the planted bug differs from it."""
_LINK = re.compile(r"\[([\w./-]+)#(\d+)\]\(https://github\.com/\1/issues/\2\)")


def linked(source: str | None) -> Markdown:
    """A source with its report as a link; as text what is none, for a record may hold what others wrote.

    GitHub leads on from the address of an issue where the number is a pull request's.
    """
    found = SOURCE.fullmatch(source or "")
    if found is None:
        return Markdown(escape(source or OURS))
    repository, number, note = found.groups()
    link = f"[{repository}#{number}](https://github.com/{repository}/issues/{number})"
    return Markdown(f"{link} ({escape(note)})" if note else link)


def with_links(html: str) -> str:
    """HTML in which what ``linked`` made stands as text: an address becomes a link only where its own text names it."""
    return _LINK.sub(r'<a href="https://github.com/\1/issues/\2">\1#\2</a>', html)
