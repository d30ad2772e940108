"""Reports as HTML pages, and their pictures."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness import cli
from harness.cells import cells_of
from harness.execution import execute
from harness.findings import Finding, FindingError, Violation
from harness.judge import judge_program
from harness.operations import (
    Batch,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Operation,
    Prefill,
    Program,
    Rollback,
    TrimFront,
)
from harness.recording import MOST_ENTRIES, record
from harness.reporting import html_page, pictures
from harness.reporting.checkpoint import MASKS, checkpoint_markdown
from harness.reporting.explanation import explanation
from harness.reporting.grids import kill_matrix, over_time
from harness.reporting.masks import MOST_CHARACTERS, mask, mask_picture, side_masks
from harness.reporting.pictures import timeline
from harness.trace import Trace

VOID = {"meta", "br", "hr", "img", "link", "input", "rect", "line"}
WIDTH = "mask_key_axis_equals_live_keys"
HOSTILE = "<script>alert(1)</script> | `x` **b** <img src=x onerror=y> &amp; [a](javascript:alert(1))"


class Checked(HTMLParser):
    """Every element is closed, in order; remembers names and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def found(bug: str = "", policy: Any = "offset", *operations: Operation, name: str | None = None) -> Trace:
    target = FakeTarget(policy=policy, bugs=frozenset({bug} - {""}))
    program = Program(operations or (Prefill(6), TrimFront(2), Chunk(3)))
    judges = properties.ALL if name is None else [properties.BY_ID[name]]
    with pytest.raises(FindingError) as caught:
        judge_program(target, program, judges)
    return record(execute(target, program), caught.value.finding, {})


def classes(picture: str) -> list[str]:
    return [str(each.get("class")) for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("rect")]


def test_a_mask_that_is_too_wide() -> None:
    trace = found()
    picture = mask(trace)
    assert picture is not None and "3 queries (down) by 7 keys (to the right) and 2 beyond them" in picture
    legend = 5
    drawn = classes(picture)[:-legend]
    assert len(drawn) == 3 * 9 and drawn.count("beyond") == 6
    assert "6 beyond the keys" in picture


def test_a_mask_that_shows_what_it_must_not() -> None:
    picture = mask(found("mask leaks", "live", name="mask_shows_exactly_the_visible_set"))
    assert picture is not None and "bad" in classes(picture)[:-5] and "0 beyond the keys" in picture
    hides = mask(found("mask hides itself", "live", name="mask_shows_exactly_the_visible_set"))
    assert hides is not None and "lack" in classes(hides)[:-5]


def test_no_mask_no_picture() -> None:
    trace = record(execute(FakeTarget(), Program((Prefill(3), Decode(1)))), None, {})
    assert mask(trace) is None and len(pictures(trace)) == 1 and "There is no picture" not in pictures(trace)[0]


def test_a_large_mask_is_drawn_in_cells() -> None:
    """512 queries over 1,536 keys, as a server runs them; two layers with the same mask hold it once."""
    trace = found("", "offset", Prefill(512), Chunk(512), Chunk(512), TrimFront(512), Chunk(512), name=WIDTH)
    calls = [call for forward in trace.steps[-1]["forwards"] for call in forward["attention"]]
    assert MOST_ENTRIES < 512 * 1536 and sum("cells" in call for call in calls) == 1
    assert len(trace.to_text()) < 60_000
    picture = mask(trace)
    assert picture is not None and len(picture) < 40_000
    assert (
        "512 queries (down) by 1,536 keys (to the right) and 512 beyond them; a cell is 6 queries by 11 keys" in picture
    )
    assert f"{512 * 512} beyond the keys" in picture.replace(",", "")
    paths = [str(each.get("class")) for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("path")]
    assert {"shown", "beyond", "bad"} <= set(paths) and len(paths) == len(set(paths))
    words = [each.text for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("text")]
    assert {"0", "1535", "2047", "511"} <= set(words)  # the axes carry the numbers of the mask
    assert "has 2048 keys" in explanation(trace, {}, "") and "HERE it broke." in explanation(trace, {}, "")


def test_a_large_mask_that_is_right_has_nothing_wrong() -> None:
    trace = found("positions from live_len", "live", Prefill(300), TrimFront(2), Chunk(200))
    picture = mask(trace)
    assert picture is not None and "0 entries are wrong, 0 beyond the keys" in picture
    drawn = {str(each.get("class")) for each in ElementTree.fromstring(picture).iter() if each.tag.endswith("path")}
    assert drawn == {"shown", "none", "mixed"} and "mixed: some shown, some hidden" in picture


def test_the_head_that_is_wrong_is_drawn() -> None:
    """A mask of its own for every head: the third is wrong alone."""
    program = Program((Prefill(4), Chunk(2)))
    run = execute(FakeTarget(), program)
    (forward,) = run.steps[1].forwards
    call = forward.seen.attention[0]
    assert call.shown is not None
    heads = np.repeat(call.shown, 4, axis=1)
    heads[0, 2, 0, 5] = True  # the first of two new tokens sees the second
    seen = replace(forward.seen, attention=(replace(call, shown=heads), *forward.seen.attention[1:]))
    run.steps[1] = replace(run.steps[1], forwards=(replace(forward, seen=seen),))
    trace = record(run, Finding(WIDTH, "t", Violation(1, "m"), program), {})
    picture = mask(trace)
    assert picture is not None and "layer 1, head 2, mask" in picture and "1 entry is wrong" in picture
    told = trace.steps[1]["forwards"][0]["attention"]
    assert told[0]["head"] == 2 and "head" not in told[1]


def test_noise_does_not_make_a_large_picture() -> None:
    noise = np.random.default_rng(0).random((700, 900)) < 0.5
    picture = mask_picture(cells_of(noise, noise[::-1], 800), "noise")
    assert len(picture) <= MOST_CHARACTERS and f"{700 * 100:,} beyond the keys" in picture
    ElementTree.fromstring(picture)


def test_a_mask_that_cannot_be_drawn_is_told() -> None:
    """Older traces have no cells; of calls that belong to no layer nobody can say what they must show."""
    for changed, words in (({}, "an older version wrote the trace"), ({"layer": None}, "which mask is whose")):
        trace = found("", "offset", Prefill(70), TrimFront(2), Chunk(60))
        for call in (call for forward in trace.steps[-1]["forwards"] for call in forward["attention"]):
            call.pop("cells", None)
            call.update(changed)
        told, drawn = pictures(trace)
        assert told.startswith("<p>There is no picture of the mask (60, 130): ") and words in told
        assert drawn.startswith("<svg")
        Checked(html_page("# T\n\n### 1. one\n", {"1": [told, drawn]}))


def test_the_timeline() -> None:
    picture = timeline(found("", "offset", Prefill(6), Rollback(1), TrimFront(2), Chunk(3)))
    assert picture is not None
    root = ElementTree.fromstring(picture)
    words = ["".join(each.itertext()) for each in root.iter() if each.tag.endswith("text")]
    assert "4 of 5" not in words and "3 of 5" in words and "trim" in words and "sequence 0: keys of positions" in words
    assert classes(picture) == ["held", "held", "held", "bad"]
    assert "step 4, Chunk(3), is where it broke" in picture
    batch = (Prefill(2), Prefill(3, 1), Batch((1, 0)), BatchForward((2, 1)), TrimFront(1, 0, 1))
    picture = timeline(record(execute(FakeTarget(), Program(batch, ("pool", "pool"))), None, {}))
    assert picture is not None  # both rows of a batch have moved
    words = re.findall(r">(\d+ of \d+)<", picture)
    assert words == ["2 of 2", "2 of 2", "2 of 2", "3 of 3", "3 of 3", "3 of 3", "3 of 3", "5 of 5", "4 of 5"]
    long = record(execute(FakeTarget(), Program((Prefill(1), *[Decode(1)] * 80))), None, {})
    assert timeline(long) is None


def test_sinks_and_forks_in_the_timeline() -> None:
    program = Program((Prefill(10), TrimFront(6, 3), Fork(1), Decode(1, 1)), ("pool", "pool"))
    picture = timeline(record(execute(FakeTarget(), program), None, {}))
    assert picture is not None
    assert re.findall(r">(\d+ of \d+)<", picture) == ["10 of 10", *["4 of 10"] * 4, "5 of 11"]
    assert len(classes(picture)) == 1 + 3 * 2 + 2 * 2  # what is kept in front, and what is left behind


def test_a_huge_mask_is_not_drawn() -> None:
    trace = found()
    for step in trace.steps:
        for forward in step.get("forwards", ()):
            for call in forward["attention"]:
                call["keys"] = 10**9
    assert mask(trace) is None and "There is no picture" in pictures(trace)[0]


def test_a_page_loads_nothing_that_a_record_names() -> None:
    page = html_page("# T\n\n![y](http://evil/y.png) [z](http://evil/z) <http://evil/w>\n")
    assert not {"img", "a"} & {name for name, _ in Checked(page).seen}


def test_a_page_is_whole_and_asks_for_nothing() -> None:
    trace = found()
    markdown = "# A \\| B\n\n**FAIL**: why\n\n## F\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
    markdown += f"### 1. one\n\ntext\n\n## end\n\n{HOSTILE}\n"
    page = html_page(markdown, {"1": pictures(trace), "2": ["<svg>never</svg>"]})
    seen = Checked(page).seen
    names = [name for name, _ in seen]
    assert "<title>A | B</title>" in page and 'class="verdict FAIL"' in page
    assert names.count("svg") == 2 and "never" not in page and page.index("<svg") < page.index("<h2>end")
    assert not {"script", "img", "link", "iframe"} & set(names)
    assert not [attributes for _, attributes in seen for name in attributes if name.startswith("on")]
    assert not re.findall(r'(?:src|href)="(?!#)', page) and "url(" not in page
    assert [attributes.get("scope") for name, attributes in seen if name == "th"] == ["col", "col"]


def test_explain_writes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    file.write_text(found().to_text())
    (tmp_path / "o").mkdir()
    assert cli.main(["explain", str(file), "--html", str(tmp_path / "o" / "page.html")]) == 0
    page = (tmp_path / "o" / "page.html").read_text()
    Checked(page)
    assert page.count("<svg") == 2 and "HERE it broke." in page
    assert cli.main(["explain", str(file), "--html", str(tmp_path)]) == 2
    assert "argument --html" in capsys.readouterr().err


def test_odd_steps_draw_nothing() -> None:
    trace = found()
    for steps in (({},), ("x",), ({"before": 1, "after": 2, "sequence": 0},)):
        assert pictures(Trace(trace.target, trace.program, trace.finding, steps, {})) == []  # type: ignore[arg-type]


CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
MEASURE = """<script>
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
const texts = [...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text')]
  .filter(text => { const a = text.getBoundingClientRect(), b = svg.getBoundingClientRect();
    return a.left < b.left - 1 || a.right > b.right + 1 || a.top < b.top - 1 || a.bottom > b.bottom + 1; }).length);
const boxes = [...document.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text')]
  .map(text => text.getBoundingClientRect()));
const over = boxes.map(all => all.filter((a, i) => all.some((b, j) => j > i
  && a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3)).length);
document.body.setAttribute('data-measured', JSON.stringify([wide, ...texts, ...over]));
</script></body>"""


LONG = "a_property_with_a_name_of_some_length"
HUNTS = [
    {"fault": f"{LONG}-{row}", "run": f"qwen3_vl_moe+images-{column}", "by": "p", "named": row != column, "seed": 0}
    for row in range(60)
    for column in range(12)
]
RUNS = [{"at": f"2026-01-{day:02}T01:02", "verdicts": {LONG: "PASS", f"{LONG}_2": "FAIL"}} for day in range(1, 29)]
GRIDS = [
    str(kill_matrix({"hunts": HUNTS, "faults": dict.fromkeys(one["fault"] for one in HUNTS)})),
    str(over_time("reference:qwen3_vl_moe+images", RUNS)),
]


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_shows_it_without_overflow(tmp_path: Path, width: int) -> None:
    trace = found("", "offset", Prefill(6), Rollback(1), TrimFront(2), Chunk(3))
    rows = "\n".join(f"| {'property_with_a_long_name' * 2} | {number} | {'words ' * 9} |" for number in range(5))
    markdown = (
        f"# T\n\n**FAIL**: w\n\n| a | b | c |\n|---|---|---|\n{rows}\n\n### 1. one\n\n```text\n{'x' * 300}\n```\n"
    )
    large = found("", "offset", Prefill(512), Chunk(512), Chunk(512), TrimFront(512), Chunk(512), name=WIDTH)
    narrow = cells_of(np.ones((1, 3), bool), np.ones((1, 2), bool), 2)
    drawn = [*pictures(trace), *GRIDS, *pictures(large), mask_picture(narrow, f"before, program {'bounded ' * 20}")]
    fits(tmp_path, width, html_page(markdown, {"1": drawn}), len(drawn))


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_shows_a_validation_without_overflow(tmp_path: Path, width: int) -> None:
    """With the mask of a side, and a finding that was shrunk."""
    published = Path(__file__).parents[3] / "reports" / "published" / "checkpoints"
    record = json.loads(sorted(published.glob("*.json"))[0].read_text())
    visible = np.tri(512, 1536, 1024, dtype=bool)
    told = cells_of(np.ones((512, 2048), bool), visible, 1536).to_json()
    mask = {"side": "before", "program": "sinks_and_rollback", "operation": "Chunk(512)", "layer": 0, "cells": told}
    original = {"message": "words " * 30, "program_text": "Chunk(512) ; " * 30, "replay": "kv-harness replay x.json"}
    finding = {"program": "bounded", "property": WIDTH, "target": "t", "message": "m", "program_text": "Prefill(1)"}
    record["masks"] = [mask | {"mask_shape": [1, 1, 512, 2048]}]
    record["findings"] = [finding | {"replay": "kv-harness replay y.json", "original": original}]
    page = html_page(checkpoint_markdown(record), {MASKS: list(side_masks(record))})
    assert "shrunk from" in page
    fits(tmp_path, width, page, 1)


def fits(tmp_path: Path, width: int, text: str, drawn: int) -> None:
    """The browser measures the page itself, and how many texts of its pictures lie outside, or over another one."""
    page = tmp_path / "page.html"
    page.write_text(text.replace("</body>", MEASURE))
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    measured = re.search(r'data-measured="\[([^"]*)\]"', done.stdout)
    assert measured is not None, done.stdout[-500:]
    assert measured[1].split(",") == ["0"] * (1 + 2 * drawn), measured[1]  # beyond the page, the picture, a text
