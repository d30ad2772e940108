"""A report as one HTML page: its Markdown, with pictures. It needs no network and no script."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from html import escape
from urllib.parse import quote

from markdown_it import MarkdownIt
from markdown_it.token import Token

from harness.reporting.text import CLOSE, OPEN, link

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #fff; --line: #d0d5db; --soft: #f3f5f7; --held: #9cc3ee;
  --good: #3f7fbf; --bad: #d1362f; --warn: #e8a33d; --edge: #33475b; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6e9; --paper: #15181c; --line: #3a4149; --soft: #1f242a;
  --held: #2f5c8a; --good: #6aa9e9; --bad: #f0635c; --warn: #d9912b; --edge: #b9c6d3; } }
body { margin: 0 auto; max-width: 72rem; padding: 1rem 1.5rem 3rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
a { color: var(--good); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2rem; } h3 { font-size: 1rem; }
.verdict { padding: .5rem .8rem; border-left: .4rem solid var(--warn); background: var(--soft); }
.verdict.PASS { border-color: var(--good); } .verdict.FAIL, .verdict.KNOWN { border-color: var(--bad); }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { border: 1px solid var(--line); padding: .25rem .5rem; text-align: left; vertical-align: top;
  overflow-wrap: break-word; }
thead th { background: var(--soft); }
pre { background: var(--soft); padding: .6rem; overflow-x: auto; } code { font: .85rem/1.4 ui-monospace, monospace; }
svg { max-width: 100%; height: auto; display: block; margin: .8rem 0; } svg text { font: 10px system-ui, sans-serif;
  fill: var(--ink); } svg .mark { fill: var(--bad); } .held { fill: var(--held); } .bad { fill: var(--bad); }
.edge, .axis { stroke: var(--edge); } .shown { fill: var(--good); } .none { fill: var(--soft); stroke: var(--line); }
.lack { fill: none; stroke: var(--bad); stroke-width: 2; } .beyond { fill: var(--warn); stroke: var(--bad); }
.mixed { fill: var(--held); }
@media print { body { max-width: none; padding: 0; font-size: 11px; } h2, h3 { break-after: avoid; }
  table, svg, pre { break-inside: avoid; } .scroll { overflow: visible; } pre { white-space: pre-wrap; } }
"""
_VERDICT = re.compile(r"<p><strong>([A-Z ]+)</strong>")


def html_page(markdown: str, pictures: Mapping[str, Sequence[str]] | None = None, pages: Collection[str] = ()) -> str:
    """The page. ``pictures``: SVG to be put below what follows the heading of this name, or that begins with this
    number and a dot (findings are numbered). ``pages``: Markdown files to which ``text.link`` links, whose HTML is
    linked here. HTML, other links and images in the Markdown are shown as text: a record may hold what others wrote."""
    parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image", "link", "autolink"])
    tokens = _folding(parser.parse(markdown))
    title = next((tokens[at + 1].content for at, token in enumerate(tokens) if token.tag == "h1"), "Report")
    body = parser.renderer.render(_with_pictures(tokens, pictures or {}), parser.options, {})
    body = body.replace("<table>", '<div class="scroll" tabindex="0"><table>').replace("</table>", "</table></div>")
    body = body.replace("<th>", '<th scope="col">').replace("<th style", '<th scope="col" style')
    body = _VERDICT.sub(
        lambda found: f'<p class="verdict {found[1].split()[0]}"><strong>{found[1]}</strong>', body, count=1
    )
    for page in pages:
        to = quote(page)
        body = body.replace(str(link(page)), f'<a href="{to.removesuffix(".md")}.html">{to.removesuffix(".md")}</a>')
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(_plain(title))}</title>\n"
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n"
    )


def _folding(tokens: Sequence[Token]) -> list[Token]:
    """Paragraphs that are nothing but our own lines around what folds away, as the HTML that they are."""
    made: list[Token] = []
    for token in tokens:
        if token.type == "paragraph_close" and made[-1].type == "inline" and made[-1].content in (OPEN, CLOSE):
            line = made[-1].content
            del made[-2:]
            made.append(Token("html_block", "", 0, content=f"{line}\n"))
        else:
            made.append(token)
    return made


def _plain(text: str) -> str:
    """Markdown's escapes taken away."""
    return re.sub(r"\\([\\`|*<])", r"\1", text)


def _with_pictures(tokens: Sequence[Token], pictures: Mapping[str, Sequence[str]]) -> list[Token]:
    placed: list[Token] = []
    waiting: Sequence[str] = ()
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            placed.extend(Token("html_block", "", 0, content=f"{picture}\n") for picture in waiting)
            name = tokens[at + 1].content
            waiting = pictures.get(name) or pictures.get(name.partition(".")[0], ())
        placed.append(token)
    placed.extend(Token("html_block", "", 0, content=f"{picture}\n") for picture in waiting)
    return placed
