"""A finding in a pasted report can be seen again with what stands in it, and nothing else."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.reporting import family_markdown, html_page
from harness.reporting.reproduction import FILE, MOST, reproduction
from harness.reporting.text import CLOSE, OPEN, escape
from harness.trace import read_trace

Record = dict[str, Any]
ROOT = Path(__file__).parents[3]
FOLDED = re.compile(rf"^{OPEN}\n\n.*?^```json\n(.*?)^```\n\n^```text\n(.*?)\n```\n\n{CLOSE}$", re.M | re.S)


def test_what_a_report_holds_is_replayed_in_an_empty_folder(real_offset: Record, tmp_path: Path) -> None:
    blocks = FOLDED.findall(family_markdown(real_offset))
    assert len(blocks) == len(real_offset["findings"]) > 2
    for (text, again), found in list(zip(blocks, real_offset["findings"], strict=True))[:2]:
        (tmp_path / FILE).write_text(text)
        assert again == f"kv-harness replay {FILE}"
        command = [sys.executable, "-m", "harness.cli", *again.split()[1:]]
        there = {**os.environ, "PYTHONPATH": str(ROOT)}
        ran = subprocess.run(command, cwd=tmp_path, env=there, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 1 and ran.stdout.startswith(f"FAILED  {found['property']} is still broken"), ran.stderr
        assert [path.name for path in tmp_path.iterdir()] == [FILE]
        trace = read_trace(tmp_path / FILE)
        assert (trace.steps, trace.versions) == ((), {}) and trace.finding is not None and not trace.finding["message"]
        assert len(text) < 900


def test_the_page_folds_it_and_takes_no_such_line_from_a_record(real_offset: Record) -> None:
    page = html_page(family_markdown(real_offset))
    count = len(real_offset["findings"])
    assert page.count("<details><summary>Standalone reproduction</summary>\n") == page.count("</details>\n") == count
    assert "<details>" not in html_page(f"# x\n\n{escape(OPEN)}\n\n{escape(CLOSE)}\n")
    assert "<details>" not in html_page("# x\n\n<details><summary>other</summary>\n\nbefore <details>\n")


def test_one_that_is_too_long_says_so_and_where_it_is(real_offset: Record) -> None:
    found = copy.deepcopy(real_offset["findings"][0])
    found["trace"]["program"]["operations"] *= MOST // 20
    found["replay"] = "kv-harness replay reports/findings/long_one.json --run-command"
    told = reproduction(found)
    assert "too many for a page; it is in reports/findings/long_one.json." in told and len(told) < 300


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ({"kind": "wire", "command": "x"}, " --run-command --limit 5", "It runs the command that the file names."),
        ({"kind": "checkpoint"}, "", "The checkpoint must lie where the file says"),
        ({"kind": "mlx_lm", "checkpoint": {}}, "", "The checkpoint must lie where the file says"),
        ({"kind": "mlx_lm"}, "", "It needs no other file."),
    ],
    ids=["wire", "checkpoint", "folder", "family"],
)
def test_what_else_it_needs(target: Record, options: str, said: str) -> None:
    told = reproduction({"trace": {"target": target}, "replay": f"kv-harness replay 'a b.json'{options}"})
    assert said in told and f"kv-harness replay {FILE}{options}\n" in told


def test_an_older_record_has_none(real_offset: Record) -> None:
    assert reproduction({key: value for key, value in real_offset["findings"][0].items() if key != "trace"}) == ""
