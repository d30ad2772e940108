"""The Markdown says what the record says, and its tables are tables whatever the record holds."""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from harness.findings import Finding, Verdict, Violation
from harness.operations import Program
from harness.reporting import family_markdown, summary_table
from harness.reporting.coverage import MISSED, REACHED, WITH_IMAGES
from harness.reporting.markdown import what_it_could_not_show
from harness.reporting.text import block, escape, table
from harness.targets.reference import targets
from properties import ALL

Record = dict[str, Any]
Table = list[list[str]]
PARSER = MarkdownIt("commonmark").enable("table")
CONFIGURATIONS = len(targets("qwen2_vl"))


def shown(token: Token) -> str:
    """The text that a reader sees of an inline token; anything but text shows as its type."""
    return "".join(
        part.content if part.type in ("text", "text_special") else f"<{part.type}>" for part in token.children or ()
    )


def sections(markdown: str) -> dict[str, list[Token]]:
    """Heading -> tokens below it."""
    found: dict[str, list[Token]] = {}
    here: list[Token] = []
    tokens = PARSER.parse(markdown)
    for number, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag in ("h1", "h2"):
            here = found.setdefault(shown(tokens[number + 1]), [])
        here.append(token)
    return found


def tables(tokens: list[Token]) -> list[Table]:
    found: list[Table] = []
    for number, token in enumerate(tokens):
        if token.type == "table_open":
            found.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type in ("th_open", "td_open"):
            found[-1][-1].append(shown(tokens[number + 1]))
    return found


def fences(tokens: list[Token]) -> list[str]:
    return [token.content.removesuffix("\n") for token in tokens if token.type == "fence"]


def raw_tables(markdown: str) -> Iterator[list[str]]:
    """Lines of each table; fenced blocks hold none here that begin with a bar."""
    lines: list[str] = []
    for line in [*markdown.splitlines(), ""]:
        if line.startswith("|"):
            lines.append(line)
        elif lines:
            yield lines
            lines = []


def bars(line: str) -> int:
    """Unescaped bars of a line."""
    return line.replace("\\\\", "").replace("\\|", "").count("|")


def test_the_verdict_comes_first(each: Record) -> None:
    title, _, verdict = family_markdown(each).splitlines()[:3]
    assert title == "# KV cache and mask report: reference:qwen2_vl"
    assert verdict.replace("\\", "") == f"**{each['verdict']}**: {each['verdict_reason']}"


def test_what_was_checked_against_what(each: Record) -> None:
    facts, drawn = tables(sections(family_markdown(each))["What was checked"])
    rows = {row[0]: row[1] for row in facts[1:]}
    for name in ("target", "device", "seed"):
        assert rows[name] == str(each[name])
    assert rows["mask policy"] == each["policy"]
    average = each["coverage"]["operations"] / max(each["programs"], 1)
    assert rows["programs"] == f"{each['programs']:,}, of {average:.1f} operations on average"
    assert float(rows["seconds"]) == each["seconds"]
    assert rows["profile"] == "test (15 programs over the configurations, at least 8 on each)"
    assert rows["configurations"] == f"2 of {CONFIGURATIONS} run; 0 drawn by the seed"
    assert {name: rows[name] for name in each["versions"]} == each["versions"]
    assert [(row[0], row[1], int(row[3].replace(",", ""))) for row in drawn[1:]] == [
        (one["variant"], one["storage"], one["programs"]) for one in each["configurations"]
    ]


def test_the_numbers_of_the_properties_are_those_of_the_record(each: Record) -> None:
    tokens = sections(family_markdown(each))["Properties"]
    rows = tables(tokens)[0][1:]
    assert len(rows) == len(each["properties"]) == len(ALL)
    for row, prop in zip(rows, each["properties"], strict=True):
        assert row[:2] == [prop["id"], prop["verdict"]]
        numbers = [int(cell.replace(",", "")) for cell in row[2:5]]
        assert numbers == [prop["examples"], prop["steps"], prop["decisive_steps"]]
        assert row[5] == ("-" if prop["worst"] is None else str(prop["worst"]))
    text = "\n".join(shown(token) for token in tokens if token.type == "inline")
    for prop in each["properties"]:
        assert prop["sentence"] in text
        assert prop["reason"] is None or f"{prop['verdict']}: {prop['reason']}" in text


def test_kinds_of_decisive_steps_are_told(records: dict[str, Record]) -> None:
    record = copy.deepcopy(dict(records["pass"]))
    record["properties"][0]["kinds"] = {"of one kind": 1234, "of another": 5}
    assert "Decisive: 1,234 of one kind, 5 of another." in family_markdown(record)
    assert "Decisive:" not in family_markdown(records["pass"])


def test_every_verdict_can_be_shown(records: dict[str, Record]) -> None:
    seen = {
        row[1] for record in records.values() for row in tables(sections(family_markdown(record))["Properties"])[0][1:]
    }
    assert seen == {verdict.value for verdict in Verdict}


def test_coverage_in_words(each: Record) -> None:
    rows = tables(sections(family_markdown(each))["Coverage"])[0][1:]
    expected = {key: n for key, n in each["coverage"].items() if each["path"] == "images" or key not in WITH_IMAGES}
    assert [int(row[1].replace(",", "")) for row in rows] == list(expected.values())
    assert [row[0] for row in rows] == [REACHED[key] for key in expected]
    assert REACHED["chunk_after_trim"] == "programs that chunked after a trim"


def standard(finding: Record, replay: str | None) -> str:
    program = Program.from_json(finding["program_json"])
    violation = Violation(None, finding["message"])
    return Finding(finding["property"], finding["target"], violation, program).text(replay, known="known" in finding)


def test_findings_and_control_are_in_the_standard_form(each: Record) -> None:
    found = sections(family_markdown(each))
    expected = [standard(finding, finding["replay"]) for finding in each["findings"]]
    shown_alone = fences(found["Findings"])  # failure, trace, and what replays it
    assert shown_alone[::3] == expected and len(shown_alone) == 3 * len(expected)
    assert [json.loads(text) for text in shown_alone[1::3]] == [finding["trace"] for finding in each["findings"]]
    control = each["control"]
    shows = control is not None and control["property"] is not None
    assert fences(found["Control: the planted bug"]) == ([standard(control, None)] if shows else [])
    assert fences(found["The same run again"]) == [each["command"]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pass", "offset mask policy. It found the bug after 3 programs and shrunk it to 3 operations"),
        ("offset", "None: the run itself is on the planted bug"),
        ("no control", "None: the target has no counterpart."),
        ("control missed", "and found nothing (1,234 programs, 1.25 s in all)"),
        ("control flaky", "did not come back in a fresh session, so it does not count"),
        ("fail of the same property", "the run itself breaks as well, so it does not count"),
    ],
)
def test_the_control_in_words(name: str, words: str, records: dict[str, Record]) -> None:
    tokens = sections(family_markdown(records[name]))["Control: the planted bug"]
    assert words in " ".join(shown(token) for token in tokens if token.type == "inline")


def test_a_finding_that_did_not_come_back_is_marked(records: dict[str, Record]) -> None:
    for name, marked in (("flaky", True), ("fail", False)):
        tokens = sections(family_markdown(records[name]))["Findings"]
        text = " ".join(shown(token) for token in tokens if token.type == "inline")
        assert "Found after 3 programs, shrunk to 3 operations." in text
        assert ("did not come back in a fresh session" in text) is marked


def test_the_limits_are_listed_and_never_empty(each: Record) -> None:
    limits = what_it_could_not_show(each)
    assert any("measured on one device (cpu)" in limit for limit in limits)
    assert any("random" in limit for limit in limits)
    programs, average = each["programs"], each["coverage"]["operations"] / max(each["programs"], 1)
    told = f"It speaks of the {programs:,} programs drawn, of {average:.1f} operations on average;"
    assert limits[-1] == f"{told} it is no proof for all others."
    tokens = sections(family_markdown(each))["What this run could not show"]
    assert [shown(token) for token in tokens if token.type == "inline"][1:] == limits


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pass with limits", "Only text was put in."),
        ("partial", "The run is not complete: interrupted after 1,234 programs."),
        ("vacuous", "mask_key_axis_equals_live_keys is VACUOUS: the reason for VACUOUS."),
        (
            "not applicable",
            "mask_key_axis_equals_live_keys is NOT APPLICABLE: the reason for NOT APPLICABLE.",
        ),
        ("inconclusive", "mask_key_axis_equals_live_keys is INCONCLUSIVE: the reason for INCONCLUSIVE."),
        ("known and limited", "positions_are_absolute is LIMITATION: the reason for LIMITATION."),
        ("no control", "would have found a bug here: the target has no counterpart."),
        ("control missed", "The planted bug was not caught"),
        ("flaky", "What makes mask_key_axis_equals_live_keys fail is open"),
        ("pass", f"No program was drawn for {CONFIGURATIONS - 2} configurations: plain with rows, "),
        ("pass", "Of 7 forwards, 7 hid attention or position calls"),
        ("pass", "Of 1,234 programs, 7 broke off at an error"),
        ("nothing ran", "No program ran."),
    ],
)
def test_a_limit_is_told_where_it_applies_and_only_there(name: str, words: str, records: dict[str, Record]) -> None:
    assert any(words in limit for limit in what_it_could_not_show(records[name]))
    clean = copy.deepcopy(records["pass"])
    clean["coverage"] |= {"blind_forwards": 0, "stopped_by_error": 0}
    for one in clean["configurations"]:
        one["programs"] = 1
    assert not any(words in limit for limit in what_it_could_not_show(clean))


@pytest.mark.parametrize("counter", MISSED)
def test_a_state_that_was_not_reached_is_a_limit(counter: str, records: dict[str, Record]) -> None:
    record = copy.deepcopy(records["pass"]) | {"path": "images"}
    assert MISSED[counter] not in what_it_could_not_show(record)
    record["coverage"][counter] = 0
    assert MISSED[counter] in what_it_could_not_show(record)
    on_text = what_it_could_not_show(record | {"path": "text"})
    assert (MISSED[counter] in on_text) is (counter not in WITH_IMAGES)


def test_another_kind_of_target_does_not_claim_random_weights(records: dict[str, Record]) -> None:
    record = {**records["pass"], "target": "wire:qwen2_vl"}
    assert not any("random" in limit for limit in what_it_could_not_show(record))


NASTY = "a|b `c`\n| d \\| e \\ ```` *f* <g> | ---\n\n# h"


def test_nothing_that_a_record_holds_breaks_the_document(records: dict[str, Record]) -> None:
    record = copy.deepcopy(records["fail"])
    shape = [(len(t), len(t[0])) for t in tables(PARSER.parse(family_markdown(record)))]
    record |= {"device": NASTY, "family": NASTY, "command": "run\n```\n# h"}
    record["versions"]["mlx"] = NASTY
    record["properties"][0] |= {"reason": NASTY, "sentence": NASTY, "worst": "nan"}
    record["configurations"][0]["options"] = {NASTY: NASTY}
    record["findings"][0] |= {"message": NASTY, "replay": NASTY}
    record["limits"] = [NASTY]
    markdown = family_markdown(record)
    line = " ".join(NASTY.split())

    assert [(len(t), len(t[0])) for t in tables(PARSER.parse(markdown))] == shape
    for lines in raw_tables(markdown):
        assert len({bars(one) for one in lines}) == 1
    assert list(sections(markdown)) == list(sections(family_markdown(records["fail"])))
    facts, drawn = tables(sections(markdown)["What was checked"])
    assert ["device", line] in facts
    assert drawn[1][2] == f"{line}={line}"
    assert line in [shown(t) for t in sections(markdown)["What this run could not show"] if t.type == "inline"]
    assert fences(sections(markdown)["The same run again"]) == ["run\n```\n# h"]
    finding, _, again = fences(sections(markdown)["Findings"])
    assert again.startswith("kv-harness replay trace.json")
    assert line in finding.splitlines()[1]


def test_tables_of_every_report_have_equal_rows(each: Record, real_live: Record, real_offset: Record) -> None:
    for record in (each, real_live, real_offset):
        found = list(raw_tables(family_markdown(record)))
        assert len(found) == 4
        for lines in found:
            assert len(lines) > 2 and len({bars(line) for line in lines}) == 1


def test_pieces() -> None:
    assert escape("a|b\n`c`") == "a\\|b \\`c\\`"
    assert table(("x", "n"), [("0.0e+00", "2.10")], right={1}).splitlines()[-1] == "| 0.0e+00 | 2.10 |"
    assert tables(PARSER.parse(table(("x", "n"), []))) == [[["x", "n"]]]
    assert block("a").splitlines() == ["```text", "a", "```"]
    assert block("````").splitlines()[0] == "`````text"


@pytest.mark.parametrize("field", ["schema", "schema_version"])
def test_a_record_of_another_kind_is_refused(field: str, records: dict[str, Record]) -> None:
    with pytest.raises(ValueError, match="not a kv-harness-family-report of version 1 or 2"):
        family_markdown({**records["pass"], field: "other"})


def test_summary(records: dict[str, Record], real_live: Record) -> None:
    chosen = [records[name] for name in ("pass", "offset", "no control", "control missed")] + [real_live]
    (found,) = tables(PARSER.parse(summary_table(chosen)))
    assert found[0] == ["family", "verdict", "programs", "decisive steps", "control caught after"]
    decisive = [f"{sum(p['decisive_steps'] for p in record['properties']):,}" for record in chosen]
    after = real_live["control"]["after_programs"]
    assert found[1:] == [
        ["qwen2_vl", "PASS", "1,234", decisive[0], "3 programs"],
        ["qwen2_vl (offset mask)", "FAIL", "1,234", decisive[1], "no control"],
        ["qwen2_vl", "PASS", "1,234", decisive[2], "no control"],
        ["qwen2_vl", "VACUOUS", "1,234", decisive[3], "not caught"],
        ["qwen2_vl", "PASS", str(real_live["programs"]), decisive[4], f"{after} programs"],
    ]
