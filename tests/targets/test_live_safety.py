"""The table of families that can live with a front trim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from harness.commands import live_safety

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "harness.cli", "live-safety", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_an_answer_of_every_kind() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    ran = run("--only", "llama,nemotron_nas,lfm2,llama4", "--programs", "16", "--json")
    assert ran.returncode == 0, ran.stderr
    rows = {(row["family"], row["variant"]): row for row in map(json.loads, ran.stdout.splitlines())}
    assert rows["llama", "tiny"]["live_safe"] == "yes" and rows["llama", "tiny"]["found"] == {}
    assert all(rows["llama", "tiny"]["decisive"][name] for name in live_safety.DECISIVE)
    assert rows["llama", "tiny"]["mask_length"] == "make_mask of the cache"
    linear = rows["nemotron_nas", "linear-first"]
    assert linear["live_safe"] == "no" and linear["mask_length"] == "a cache that gets no keys"
    assert linear["found"]["mask_key_axis_equals_live_keys"] == "Prefill(1) ; Chunk(2)"
    assert rows["lfm2", "tiny"]["reason"].startswith("of its attention")
    assert rows["llama4", "tiny"]["live_safe"] == "not applicable" and rows["llama4", "tiny"]["reason"]


def test_a_table() -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    ran = run("--only", "llama4")
    assert ran.returncode == 0
    assert [line.count("|") for line in ran.stdout.splitlines()] == [len(live_safety.COLUMNS) + 1] * 3


@pytest.mark.parametrize("arguments", [("--only", "none"), ("--programs", "0")])
def test_bad_input_is_one_clear_line(arguments: tuple[str, str]) -> None:
    ran = run(*arguments)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr and arguments[0] in ran.stderr.splitlines()[-1]
