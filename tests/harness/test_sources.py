"""The public reports that planted bugs are modelled on: their form, their number, and where they are shown."""

from __future__ import annotations

import pytest

import properties
from harness import cli
from harness.faults import ALL_FAULTS, VARIATIONS
from harness.reporting import html_page
from harness.reporting.kill_matrix import matrix_markdown, matrix_record
from harness.reporting.sources import OURS, SOURCE, linked, with_links

FLOOR = 153
"""Planted bugs with a report; 60 were asked for, and none of these should go again."""
FORGED = (
    "[owner/name#1](https://github.com/owner/name/issues/2)",
    "[owner/name#1](https://github.com/other/name/issues/1)",
    "[owner/name#1](https://example.org/owner/name/issues/1)",
    "[owner/name#1](javascript:alert)",
)


def test_a_source_is_a_report_and_perhaps_what_it_shows() -> None:
    wrong = [(fault.id, fault.source) for fault in ALL_FAULTS if fault.source and not SOURCE.fullmatch(fault.source)]
    assert wrong == []
    assert not any(fault.source for fault in VARIATIONS)


def test_most_planted_bugs_have_a_report() -> None:
    assert sum(bool(fault.source) for fault in ALL_FAULTS) >= FLOOR


@pytest.mark.parametrize("prop", properties.BY_ID)
def test_every_property_must_find_a_bug_that_somebody_reported(prop: str) -> None:
    assert [fault.id for fault in ALL_FAULTS if fault.breaks == prop and fault.source]


def test_the_list_names_every_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["faults", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 * len(ALL_FAULTS)
    for fault, head, told in zip(ALL_FAULTS, lines[::3], lines[2::3], strict=True):
        assert head.startswith(fault.id)
        assert told == (f"    modelled on {fault.source}" if fault.source else f"    {OURS}")


def test_what_is_shown_of_a_source() -> None:
    link = "[owner/na.me#12](https://github.com/owner/na.me/issues/12)"
    assert linked("owner/na.me#12") == link
    assert linked("owner/na.me#12 (a | b, and #13)") == f"{link} (a \\| b, and #13)"
    assert linked("") == linked(None) == linked(OURS) == OURS
    assert linked("owner/name#x <b>") == "owner/name#x \\<b>"  # a record may hold anything
    assert linked("[a](b)/c#1") == "[a](b)/c#1"
    assert with_links(f"<td>{link}</td>") == (
        '<td><a href="https://github.com/owner/na.me/issues/12">owner/na.me#12</a></td>'
    )


@pytest.mark.parametrize("text", FORGED, ids=["number", "owner", "host", "script"])
def test_an_address_that_its_text_does_not_name_is_no_link(text: str) -> None:
    assert with_links(html_page(f"# x\n\n{text}")) == html_page(f"# x\n\n{text}")


def test_the_matrix_links_reports_in_both_forms_and_says_what_is_ours() -> None:
    about = {
        name: {"summary": "[o/n#1](https://example.org)", "layer": "mask", "breaks": "p", "source": source}
        for name, source in (("a", "owner/name#7 (a trim)"), ("b", OURS), ("c", ""))
    }
    record = matrix_record(
        [], faults=about, profile="ci", seeds=[0], versions={}, device="cpu", command="kv-harness faults", partial=False
    )
    markdown = matrix_markdown(record)
    cells = [line.split(" | ") for line in markdown.splitlines() if line.startswith(("| a ", "| b ", "| c "))]
    assert [row[4].rstrip(" |") for row in cells if len(row) == 5] == [
        "[owner/name#7](https://github.com/owner/name/issues/7) (a trim)",
        OURS,
        OURS,
    ]
    page = with_links(html_page(markdown))
    assert page.count("<a href=") == 1
    assert '<a href="https://github.com/owner/name/issues/7">owner/name#7</a> (a trim)' in page
