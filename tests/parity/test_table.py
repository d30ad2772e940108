"""The command and its table: what was not compared never looks like a pass."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.parity import cli
from tests.parity.comparing import Outcome
from tests.parity.limitations import LIMITATIONS
from tests.parity.peers import missing
from tests.parity.routing import Flip
from tests.parity.running import Failure, Row
from tests.parity.table import BEGIN, END, markdown, span, summary, write_block


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


KNOWN = next(entry for entry in LIMITATIONS if entry.kind == "known failure")
LIMIT = next(entry for entry in LIMITATIONS if entry.kind == "limitation")


def test_a_row_says_what_was_measured() -> None:
    name = KNOWN.id
    row = a_row(drawn=25, known=Counter({name: 15}), alone=Counter({name: 2}), off={name: [0.5, 0.25]})
    row.outcome.flips.append(Flip(1, 7, 3e-6))
    text = markdown([row], 10, 3)
    assert line(text, "| mistral4") == (
        f"| mistral4 | mlx-lm 1.2 | text | 10 of 25 drawn | 2.3e-06 | 39 of 40 | `{name}` (15) |"
    )
    assert "10 configurations a row, seed 3" in text and "Draw 4 of each row alone, seed 3" in markdown([row], 10, 3, 4)
    assert "measured 2.5e-01 to 5.0e-01, 3e-03 to 3e+01 accepted" in line(text, f"- `{name}`")
    assert "expert layer 1, token 7" in text and "two greedy tokens 1.0e-06 apart" in text
    assert all(entry.id not in text for entry in LIMITATIONS if entry != KNOWN)


def test_a_refusal_is_told_as_it_was_said() -> None:
    met = {"known": Counter({LIMIT.id: 4}), "alone": Counter({LIMIT.id: 3})}
    text = markdown([a_row(**met, said={LIMIT.id: "ValueError: 16\n  parameters" + " more" * 99})], 10, 0)
    assert "; it said ValueError: 16 parameters more" in line(text, f"- `{LIMIT.id}`") and "more..." in text
    assert "FAILED to show it" in line(markdown([a_row(**met)], 10, 0), f"- `{LIMIT.id}`")


def test_an_entry_that_was_never_met_alone_is_not_told_as_tried() -> None:
    row = a_row(known=Counter({KNOWN.id: 9, LIMIT.id: 9}), alone=Counter({LIMIT.id: 1}), shared=Counter({KNOWN.id: 1}))
    tried, untried = markdown([row], 10, 0).split("Known failures and limitations that this run does not show:")
    assert f"- `{KNOWN.id}`" not in tried and f"- `{LIMIT.id}`" in tried
    assert line(untried, f"- `{KNOWN.id}`").endswith("; never met alone, so not tried.")
    elsewhere = a_row(alone=Counter({KNOWN.id: 1}), off={KNOWN.id: [0.5]})
    assert "never met alone" not in markdown([row, elsewhere], 10, 0), "one row is enough"


def test_what_was_not_compared_is_no_pass() -> None:
    text = markdown([a_row(version=None, compared=0, drawn=0, outcome=Outcome())], 10, 0)
    assert "| not installed |" in line(text, "| mistral4") and "0.0e+00" not in text
    assert text.startswith("NOT COMPARED with mlx-lm: "), "before the table"
    text = markdown([a_row(compared=0, drawn=500, outcome=Outcome())], 10, 0)
    assert "| 0 of 500 drawn | none to compare | none |" in line(text, "| mistral4") and "0.0e+00" not in text
    assert "1 rows: 0 agree; 1 compared nothing" in text
    text = markdown([a_row(compared=0, tied=7, drawn=500, outcome=Outcome())], 10, 0)
    assert "| 0 of 500 drawn, 7 tied at the first token | none to compare |" in text


def test_a_row_that_failed_shows_the_difference_that_did() -> None:
    nothing = Outcome()
    for failures, outcome, shown in (
        ([Failure("x", 3, 0.2), Failure("x", 4, 0.7), Failure("x", 5)], nothing, "**7.0e-01**"),
        ([Failure("x", 3, float("inf"))], Outcome(worst=1e-6, logits=64), "**inf**"),
        ([Failure("Refusal", 3)], nothing, "nothing agreed"),
        ([Failure("Refusal", 3)], Outcome(worst=1e-6, logits=64), "1.0e-06"),
    ):
        text = markdown([a_row(failures=failures, outcome=outcome)], 10, 0)
        assert f"| {shown} |" in line(text, "| mistral4") and "0.0e+00" not in text
        assert f"**{len(failures)} FAILED**" in text and "1 rows: 0 agree; 1 FAILED." in text


def test_the_sum_counts_every_row_once() -> None:
    rows = [a_row(), a_row(), a_row(compared=0), a_row(version=None, compared=0), a_row(failures=[Failure("x", 0)])]
    told = summary([*rows, a_row(compared=0, failures=[Failure("x", 0)])])
    assert told.startswith("6 rows: 2 agree; 2 FAILED; 1 compared nothing, and say nothing about our models; 1 not ")
    assert summary([a_row()]) == "1 rows: 1 agree."


def test_exact_agreement_is_explained_where_it_occurs() -> None:
    exact = Outcome(worst=0.0, logits=640, greedy=40, equal=40)
    assert "the same kernels" in markdown([a_row(outcome=exact)], 10, 0)
    for other in (a_row(), a_row(peer="transformers", outcome=exact), a_row(compared=0, outcome=Outcome())):
        assert "the same kernels" not in markdown([other], 10, 0)


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
        (["--families", "qwen9"], "'qwen9' is not one of cohere2"),
        (["--peers", "mlx_lm"], "'mlx_lm' is not one of transformers"),
        (["--families", "mistral4", "--modalities", "image"], "nothing to compare"),
        (["--example", "-1"], "--example"),
        (["--write", "--families", "mistral4"], "--write replaces the whole table, so it goes without --families"),
        (["--write", "--peers", "mlx-lm", "--modalities", "text"], "so it goes without --peers, --modalities"),
        (["--write", "--example", "0"], "so it goes without --example"),
    ],
)
def test_unusable_input_is_one_line(
    given: list[str], told: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "_run", lambda tasks, options: pytest.fail("it ran"))
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
        (
            a_row(failures=[Failure("Disagreement: far off", 17, 0.3)]),
            f"FAIL mistral4, mlx-lm, text: Disagreement: far off\n  again: {cli.again(a_row(), 0, 17)}\n",
        ),
        (a_row(version=None, compared=0), "2 rows: 1 agree; 1 not compared, the peer is not installed."),
    ):
        rows[1:] = [bad]
        cli.README.write_text(f"{BEGIN}\nold\n{END}\n")
        assert cli.main(["--write"]) == 1 and "old" in cli.README.read_text()
        assert told in capsys.readouterr().err


def test_a_peer_that_is_missing_gets_a_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cli.NAMES["mlx-vlm"], "needs", ("no-such-package",), raising=False)
    assert cli.main(["--peers", "mlx-vlm", "--modalities", "text", "--jobs", "1"]) == 1
    out = capsys.readouterr()
    first = "NOT COMPARED with mlx-vlm: no-such-package not installed"
    assert out.err.startswith(first) and out.out.startswith(first) and out.out.count("| not installed |") == 3
    assert out.err.rstrip().endswith("3 rows: 0 agree; 3 not compared, the peer is not installed.")


def test_the_command_of_a_failure_repeats_that_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def run(tasks: Any, options: Any) -> list[Row]:
        asked.append((tasks, options.seed, options.example))
        return [a_row(drawn=1, compared=1)]

    monkeypatch.setattr(cli, "_run", run)
    command = cli.again(a_row(family="qwen2_vl", peer="mlx-vlm", modality="mixed"), 7, 21)
    assert command.startswith("python -m tests.parity ") and command.endswith(" --seed 7 --example 21")
    assert cli.main(command.split()[3:]) == 0
    assert asked == [([("mlx-vlm", "qwen2_vl", "mixed")], 7, 21)]


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
    assert done.stderr.rstrip().endswith("2 rows: 2 agree.")
