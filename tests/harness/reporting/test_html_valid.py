"""Generated pages, as they lie on the disk: HTML5 without an error of a strict parser, below 300 KB, no request."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness import cli
from harness.execution import execute
from harness.findings import FindingError
from harness.judge import judge_program
from harness.operations import Chunk, Prefill, Program, TrimFront
from harness.recording import record
from harness.reporting import family_markdown, html_page, write_pages
from harness.reporting.pages import MOST_PICTURES
from tests.needed import needed

ROOT = Path(__file__).parents[3]
SMALL = ("--max-kv-size", "16", "--prefill-chunk-size", "8", "--tokens", "40", "--decode", "2")
MOST = 300_000  # bytes
LOADS = re.compile(
    r"""(?:src|href|srcset|data|action|poster)\s*=\s*["']?(?!#)|url\(|@import|<(?:script|link|iframe|img)"""
)
#: Of the index to a report beside it: a relative path, which nothing loads by itself.
BESIDE = re.compile(r'<a href="(?:families|targets|checkpoints|faults)/[^":]*\.html">')


def errors(page: str) -> list[str]:
    """What html5lib finds wrong in a page."""
    html5lib = needed("html5lib")
    parser = html5lib.HTMLParser(strict=False)
    parser.parse(page)
    return [f"line {place[0]}: {code} {said}" for place, code, said in parser.errors]


def check(page: str) -> None:
    assert errors(page) == []
    assert len(page.encode()) < MOST
    assert not LOADS.findall(BESIDE.sub("<a>", page))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reports of all kinds that commands write: families that fail and pass, a validation, an index, a trace."""
    out = tmp_path_factory.mktemp("reports")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KV_HARNESS_CACHE", str(out / "cache"))
        family = "nemotron_nas"
        assert (
            cli.main(["run", "--profile", "smoke", "--families", family, "--policy", "offset", "--out", str(out)]) == 1
        )
        assert (
            cli.main(["run", "--profile", "smoke", "--target", f"reference:{family}:plain:rows", "--out", str(out)])
            == 0
        )
        checkpoint = out / "mine"
        assert cli.main(["synth", family, str(checkpoint)]) == 0
        assert cli.main(["validate", str(checkpoint), *SMALL, "--after", "offset", "--out", str(out)]) == 1
    assert cli.main(["report", "--out", str(out)]) == 0
    for number, trace in enumerate(sorted((out / "findings").glob("*.json"))[:3]):
        assert cli.main(["explain", str(trace), "--html", str(out / f"explained-{number}.html")]) == 0
    return out


def test_what_commands_write_is_valid(folder: Path) -> None:
    pages = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.html")}
    kinds = {Path(name).parts[0] for name in pages}
    assert kinds >= {"families", "targets", "checkpoints", "index.html", "explained-0.html"}
    assert sum("<svg" in page for page in pages.values()) >= 3
    for page in pages.values():
        check(page)


def test_reports_of_every_end_are_valid(each: dict[str, Any]) -> None:
    check(html_page(family_markdown(each)))


def test_published_reports_are_valid() -> None:
    found = sorted((ROOT / "reports" / "published" / "families").glob("*.json"))
    assert found
    for path in found:
        check(html_page(family_markdown(json.loads(path.read_text()))))


def test_many_large_pictures_do_not_make_a_large_page(records: dict[str, Any], tmp_path: Path) -> None:
    """What has no room is told."""
    target, program = FakeTarget(policy="offset"), Program((Prefill(14), TrimFront(2), Chunk(17)))  # 60 KB
    with pytest.raises(FindingError) as caught:
        judge_program(target, program, properties.ALL)
    trace = record(execute(target, program), caught.value.finding, {})
    (tmp_path / "findings").mkdir()
    (tmp_path / "findings" / trace.file_name).write_text(trace.to_text())
    findings = [{"replay": f"kv-harness replay {trace.file_name}"}] * 20
    markdown = "# T\n\n" + "\n\n".join(f"### {number}. one" for number in range(1, 21))
    write_pages(tmp_path / "x.json", markdown, {"findings": findings}, tmp_path)
    page = (tmp_path / "x.html").read_text()
    check(page)
    assert len(page) < MOST_PICTURES + 20_000
    assert page.count("<svg") + page.count("A picture is left out") == 40 and 20 < page.count("<svg") < 40


@pytest.mark.parametrize(
    "wrong", ["<p>a</div>", "<table><p>x</p></table>", "<a href='x>", "&nosuch;", "<svg><rect></p>"]
)
def test_the_validator_bites(wrong: str) -> None:
    assert errors(html_page("# T").replace("</main>", f"{wrong}</main>"))


@pytest.mark.parametrize(
    "wrong", ['<img src="x">', "<style>a { background: url(x) }</style>", '<a href="http://x">', "<script>"]
)
def test_a_request_would_be_seen(wrong: str) -> None:
    assert LOADS.findall(BESIDE.sub("<a>", wrong)) and not LOADS.findall(html_page("# T\n\nhttp://x/y\n"))
