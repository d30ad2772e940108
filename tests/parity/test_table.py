"""The command and its table: what was not compared never looks like a pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.parity import cli
from tests.parity.comparing import Outcome
from tests.parity.limitations import LIMITATIONS
from tests.parity.peers import missing
from tests.parity.routing import Flip
from tests.parity.running import Row
from tests.parity.table import BEGIN, END, markdown, span, write_block


def a_row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "family": "mistral4",
        "peer": "mlx-lm",
        "version": "1.2",
        "modality": "text",
        "compared": 10,
        "drawn": 10,
        "outcome": Outcome(worst=2.34e-6, logits=640, greedy=40, equal=39, ties=[1e-6]),
    }
    return Row(**fields | changes)


def line(text: str, start: str) -> str:
    (found,) = [row for row in text.splitlines() if row.startswith(start)]
    return found


def test_a_row_says_what_was_measured() -> None:
    entry = LIMITATIONS[0]
    row = a_row(drawn=25, known={entry.id: 15}, off={entry.id: [0.5, 0.25]})
    row.outcome.flips.append(Flip(1, 7, 3e-6))
    text = markdown([row], 10, 3)
    assert line(text, "| mistral4") == (
        f"| mistral4 | mlx-lm 1.2 | text | 10 of 25 drawn | 2.3e-06 | 39 of 40 | `{entry.id}` (15) |"
    )
    assert "10 configurations a row, seed 3" in text
    assert "measured 2.5e-01 to 5.0e-01" in line(text, f"- `{entry.id}`")
    assert "expert layer 1, token 7" in text and "two greedy tokens 1.0e-06 apart" in text
    assert all(entry.id not in text for entry in LIMITATIONS[1:])


def test_what_was_not_compared_is_no_pass() -> None:
    text = markdown([a_row(version=None, compared=0, drawn=0, outcome=Outcome())], 10, 0)
    assert "| not installed |" in line(text, "| mistral4") and "0.0e+00" not in text
    text = markdown([a_row(compared=0, drawn=500, outcome=Outcome())], 10, 0)
    assert "| 0 of 500 drawn | none to compare | 0 of 0 |" in line(text, "| mistral4") and "0.0e+00" not in text
    assert "**1 FAILED**" in markdown([a_row(failures=["x"])], 10, 0)


def test_a_span_of_one_is_one() -> None:
    assert span([0.5]) == "5.0e-01" and span([2.0, 1.0]) == "1.0e+00 to 2.0e+00"


def test_only_the_block_between_the_marks_changes(tmp_path: Path) -> None:
    file = tmp_path / "README.md"
    file.write_text(f"above\n{BEGIN}\nold\n{END}\nbelow\n")
    for _ in range(2):
        write_block(file, "new")
        assert file.read_text() == f"above\n{BEGIN}\nnew\n{END}\nbelow\n"
    file.write_text("no marks\n")
    with pytest.raises(ValueError, match=r"README.md: lacks the line"):
        write_block(file, "new")
    assert file.read_text() == "no marks\n"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--examples", "0"], "'0' is not a whole number above 0"),
        (["--examples", "many"], "'many'"),
        (["--families", "qwen9"], "'qwen9' is not one of mistral4"),
        (["--peers", "mlx_lm"], "'mlx_lm' is not one of transformers"),
        (["--families", "mistral4", "--modalities", "image"], "nothing to compare"),
    ],
)
def test_unusable_input_is_one_line(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = cli.main(given)
    except SystemExit as error:
        code = error.code
    assert code == 2
    (said,) = [row for row in capsys.readouterr().err.splitlines() if "error: " in row]
    assert told in said


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Row]:
    """What the command finds, in place of a run; README.md is a copy."""
    made: list[Row] = []
    monkeypatch.setattr(cli, "_run", lambda tasks, options: made)
    monkeypatch.setattr(cli, "README", tmp_path / "README.md")
    cli.README.write_text(f"{BEGIN}\nold\n{END}\n")
    return made


def test_the_exit_code_tells_a_pass_from_the_rest(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    rows.append(a_row())
    assert cli.main([]) == 0 and "old" in cli.README.read_text()
    assert cli.main(["--write"]) == 0 and "| mistral4 | mlx-lm 1.2" in cli.README.read_text()
    for bad, told in (
        (a_row(failures=["Disagreement: far off"]), "FAIL mistral4, mlx-lm, text: Disagreement: far off"),
        (a_row(version=None, compared=0), "NOT COMPARED with mlx-lm"),
    ):
        rows[1:] = [bad]
        cli.README.write_text(f"{BEGIN}\nold\n{END}\n")
        assert cli.main(["--write"]) == 1 and "old" in cli.README.read_text()
        assert told in capsys.readouterr().err


def test_a_peer_that_is_missing_gets_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.NAMES["mlx-vlm"], "needs", ("no-such-package",), raising=False)
    assert cli.main(["--peers", "mlx-vlm", "--modalities", "text", "--jobs", "1"]) == 1
    out = capsys.readouterr()
    assert out.out.count("not installed") == 3 and "no-such-package not installed" in out.err


def test_the_command_runs_rows_in_processes_of_their_own() -> None:
    if missing(cli.NAMES["mlx-lm"]):
        pytest.skip("not installed: mlx-lm")
    chosen = ["--peers", "mlx-lm", "--families", "nemotron_nas,qwen2_vl", "--examples", "2", "--jobs", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.parity", *chosen],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for family in ("nemotron_nas", "qwen2_vl"):
        row = line(done.stdout, f"| {family}")
        assert "| text | 2 " in row and "| 8 of 8 |" in row
