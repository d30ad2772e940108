"""The frame of every picture of a page.

Colours are classes, which the page that holds a picture defines (``harness.reporting.html``); every picture says in its
``desc`` what it shows, for whoever does not see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def svg(width: float, height: float, title: str, told: str, body: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<desc>{escape(told)}</desc>", *body, "</svg>"])


def label(x: float, y: float, words: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
