"""The kill matrix: what is tried where, what counts as found, and what a survivor, an interrupt and bad names do."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

import harness.faults
import properties
from harness import cli, detection
from harness.detection import Hunt, hunt, hunt_all, runs_of
from harness.faults import ALL_FAULTS, FAULTS, IMAGE_FAULTS, VARIATIONS, Fault, windows
from harness.faults.model import Layer
from harness.faults.patching import replacing
from harness.profiles import PROFILES
from harness.reporting.kill_matrix import matrix_markdown, summarise
from harness.targets.reference import FAMILIES, paths, targets
from harness.terminal import INTERRUPTS
from harness.workers import Died
from reference_models.engine.no_cache import row_widths

SMOKE = PROFILES["smoke"]
BY_ID = {fault.id: fault for fault in ALL_FAULTS}
COMPLETES = "every_operation_completes"
HARMLESS = Fault("nothing-is-wrong", "the target is right", COMPLETES, contextlib.nullcontext, layer="cache")


def test_what_was_inherited_is_inherited_again() -> None:
    """A patched subclass must not keep the method as its own: it would hide bugs that are planted in its base."""

    class Base:
        def act(self) -> int:
            return 1

    class Heir(Base):
        pass

    with replacing(Heir, "act", lambda original: lambda self: original(self) + 1)():
        assert Heir().act() == 2
    assert "act" not in vars(Heir)
    with replacing(Base, "act", lambda original: lambda self: 7)():
        assert Heir().act() == 7
    assert Heir().act() == 1


def test_ids_are_unique_and_every_bug_says_where_it_lives() -> None:
    assert len(BY_ID) == len(ALL_FAULTS)
    assert [fault.id for fault in ALL_FAULTS if fault.layer not in get_args(Layer)] == []
    assert {fault.breaks for fault in ALL_FAULTS} <= set(properties.BY_ID)
    assert {(fault.layer, fault.breaks) for fault in VARIATIONS} == {(None, None)}


@pytest.mark.parametrize("fault", ALL_FAULTS, ids=lambda fault: fault.id)
def test_a_bug_is_tried_where_it_can_show(fault: Fault) -> None:
    runs = runs_of(fault, FAMILIES)
    everywhere = [(family, path) for family in FAMILIES for path in paths(family)]
    assert runs and set(runs) <= set(everywhere) and runs == sorted(runs, key=everywhere.index)
    if fault in IMAGE_FAULTS:
        assert {path for _, path in runs} == {"images"}
    for family, path in runs:
        assert any(fault.shown_on(target) for target in targets(family, path=path, far=True))
    if fault in windows.FAULTS:
        assert runs == [("cohere2", "text"), ("olmo3", "text"), ("qwen2_vl", "text")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_planted_bug_does_not_end_what_looks_at_a_model_in_front_of_the_programs(fault: Fault) -> None:
    """How wide rows are is asked once, of a forward over caches without buffers: by whichever hunt comes first."""
    target = targets("nemotron_nas")[0]
    right = target.row_widths
    with fault.plant():
        assert row_widths(target.variant.model()) == right


def test_what_a_hunt_says() -> None:
    made = hunt(BY_ID["mask-leaks-one-future-token"], "nemotron_nas", "text", SMOKE, 3)
    assert (made.fault, made.run, made.seed) == ("mask-leaks-one-future-token", "nemotron_nas", 3)
    assert made.by == "mask_shows_exactly_the_visible_set" and made.program == "Prefill(2)" and made.operations == 1
    assert made.after is not None and 1 <= made.after <= made.programs and made.seconds is not None
    assert made.message is not None and "shows the key" in made.message
    again = hunt(BY_ID["mask-leaks-one-future-token"], "nemotron_nas", "text", SMOKE, 3)
    assert {**again.to_json(), "seconds": 0} == {**made.to_json(), "seconds": 0}


def test_a_survivor_is_not_found() -> None:
    made = hunt(HARMLESS, "nemotron_nas", "text", SMOKE, 0)
    assert made.by is None and made.program is None and made.programs > 0
    assert summarise([made.to_json()]).text() == "0 of 1 hunts found their bug (planted: 1)"


def test_an_interrupt_is_not_a_survivor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert next(hunt_all([HARMLESS], ["nemotron_nas"], SMOKE, [0])).by is None
    monkeypatch.setattr(INTERRUPTS, "requested", True)
    with pytest.raises(KeyboardInterrupt):
        hunt(HARMLESS, "nemotron_nas", "text", SMOKE, 0)


def test_processes_find_what_one_finds() -> None:
    faults = [BY_ID["mask-leaks-one-future-token"], BY_ID["trim-one-short"]]

    def found(jobs: int) -> list[dict[str, Any]]:
        hunts = hunt_all(faults, ["nemotron_nas"], SMOKE, [0, 1], jobs)
        return sorted(({**one.to_json(), "seconds": 0} for one in hunts), key=str)

    assert found(2) == found(1) and len(found(2)) == 4


def test_a_bug_that_kills_its_process_is_named_and_the_rest_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(detection, "_HUNTS", 1)
    names = "mask-leaks-one-future-token,trim-one-short"
    ended = [(0, [hunted("mask-leaks-one-future-token", "x", 0)]), (1, Died("SIGKILL"))]
    monkeypatch.setattr(detection, "in_processes", lambda calls, jobs: iter(ended))
    code, out, err = run(capsys, "--only", names, "--jobs", "2", "--out", str(tmp_path))
    assert code == 1 and "1 of 1 hunts found their bug (planted: 1)" in out
    assert err == "error: the process that planted trim-one-short died (SIGKILL)\n"


def hunted(fault: str, run: str, seed: int, after: int | None = 2, by: str = "p", named: bool = True) -> Hunt:
    found = after is not None
    seconds, operations = (0.5, 3) if found else (None, None)
    return Hunt(fault, run, seed, by if found else None, after, seconds, operations, "", "", 9, named)


def test_medians_are_over_what_was_found() -> None:
    hunts = [hunted("a", "x", 0, 1), hunted("a", "x", 1, 8), hunted("b", "x", 0, 3), hunted("b", "x", 1, None)]
    summary = summarise([one.to_json() for one in hunts])
    assert (summary.hunts, summary.killed, summary.median_programs) == (4, 3, 3)
    assert summary.text() == (
        "3 of 4 hunts found their bug (planted: 2); median 0.50 s and 3 programs to the first sight, "
        "shrunk to 3 operations"
    )


def test_what_its_own_property_missed_is_counted() -> None:
    text = summarise([hunted("a", "x", 0).to_json(), hunted("b", "x", 0, named=False).to_json()]).text()
    assert text.startswith(
        "2 of 2 hunts found their bug (planted: 2), 1 of them not by the property that they name; median "
    )


def test_the_property_that_a_bug_names_is_asked_alone() -> None:
    """A wrong mask is reported first by its content; memory has nothing to say of it, and finite logits neither."""
    leaks = BY_ID["mask-leaks-one-future-token"]
    assert hunt(leaks, "nemotron_nas", "text", SMOKE, 0).named
    for other, named in (("outputs_equal_the_witness", True), ("memory_is_given_back", False)):
        made = hunt(dataclasses.replace(leaks, breaks=other), "nemotron_nas", "text", SMOKE, 0)
        assert (made.by, made.named) == ("mask_shows_exactly_the_visible_set", named)


def test_further_seeds_ask_the_named_property_first_and_shrink_nothing() -> None:
    leaks = BY_ID["mask-leaks-one-future-token"]
    for breaks, by in (("outputs_equal_the_witness", None), ("memory_is_given_back", leaks.breaks)):
        made = hunt(dataclasses.replace(leaks, breaks=breaks), "nemotron_nas", "text", SMOKE, 0, first=False)
        assert (made.by, made.named, made.operations) == (by or breaks, by is None, None)
    first, second = hunt_all([leaks], ["nemotron_nas"], SMOKE, [4, 5])
    assert (first.seed, second.seed) == (4, 5) and first.operations == 1 and second.operations is None


def test_a_bug_that_its_property_misses_fails_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dataclasses.replace(BY_ID["trim-reports-zero"], breaks="memory_is_given_back")
    monkeypatch.setattr(harness.faults, "ALL_FAULTS", (wrong,))
    code, out, _ = run(capsys, "--out", str(tmp_path))
    found = "only trim_reports_what_it_removed finds it"
    assert code == 1 and f"UNNAMED   trim-reports-zero in nemotron_nas, seed 0: {found}" in out
    text = (tmp_path / "faults" / "kill-matrix.md").read_text()
    assert "## Not found by the property that they name" in text and "Survivors" not in text


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["faults", "--profile", "smoke", "--families", "nemotron_nas", *arguments])
    return code, *capsys.readouterr()


def test_the_command_writes_the_matrix(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    only = "mask-leaks-one-future-token,trim-reports-zero"
    code, out, err = run(capsys, "--only", only, "--seeds", "2", "--out", str(tmp_path))
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("4 of 4 hunts found their bug (planted: 2); median ")
    record = json.loads((tmp_path / "faults" / "kill-matrix.json").read_text())
    assert [(one["fault"], one["seed"]) for one in record["hunts"]] == [(f, s) for f in only.split(",") for s in (0, 1)]
    assert record["summary"]["killed"] == 4 and record["partial"] is False and record["seeds"] == [0, 1]
    text = (tmp_path / "faults" / "kill-matrix.md").read_text()
    assert text == matrix_markdown(record) and "Survivors" not in text
    assert record["command"] in text and text.splitlines()[-1] == out.splitlines()[-1] + "."
    cells = next(line for line in text.splitlines() if line.startswith("| trim-reports-zero")).split("|")
    worst = max(one["after"] for one in record["hunts"] if one["fault"] == "trim-reports-zero")
    assert cells[2].strip() == "trim_reports_what_it_removed" and cells[3].strip() == f"{worst} p, 2 op"


def test_a_survivor_fails_the_command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.faults, "ALL_FAULTS", (BY_ID["trim-reports-zero"], HARMLESS))
    code, out, _ = run(capsys, "--out", str(tmp_path))
    assert code == 1 and "SURVIVED  nothing-is-wrong in nemotron_nas, seed 0: " in out
    assert out.splitlines()[-1].startswith("1 of 2 hunts found their bug (planted: 2)")
    text = (tmp_path / "faults" / "kill-matrix.md").read_text()
    assert text.index("## Survivors") < text.index("## Found") and "| SURVIVED" in text


def test_an_interrupt_keeps_what_was_measured(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    whole: Callable[..., Hunt] = detection.hunt

    def second_time_stopped(*arguments: Any) -> Hunt:
        made.append(whole(*arguments))
        return made[0]

    def check() -> None:
        if made:
            raise KeyboardInterrupt

    monkeypatch.setattr(detection, "hunt", second_time_stopped)
    monkeypatch.setattr(INTERRUPTS, "check", check)
    code, out, _ = run(capsys, "--only", "trim-reports-zero,trim-returns-without-moving", "--out", str(tmp_path))
    assert code == 1 and out.splitlines()[-1].startswith("interrupted; 1 of 1 hunts found their bug (planted: 1)")
    record = json.loads((tmp_path / "faults" / "kill-matrix.json").read_text())
    assert record["partial"] is True and len(record["hunts"]) == 1
    assert "**Interrupted: not all were tried.**" in (tmp_path / "faults" / "kill-matrix.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--only", "mask-leak"), "--only: unknown 'mask-leak'; nearest: mask-leaks-one-future-token"),
        (("--only", " , "), "--only: names nothing"),
        (("--families", "qwen4"), "--families: unknown 'qwen4'; nearest: "),
        (("--seeds", "0"), "--seeds: must lie in [1, 1000], got 0"),
        (("--only", "rope-delta-forgotten"), "none of these bugs can show in nemotron_nas"),
        (("--out", "/dev/null/x"), "cannot write reports: /dev/null/x"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    given = arguments if "--out" in arguments else (*arguments, "--out", str(tmp_path))
    code, out, err = run(capsys, *given)
    assert (code, out) == (2, "") and err.count("\n") == 1 and why in err
