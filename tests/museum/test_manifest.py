"""The museum: its manifest says what it must, its environments are made or refused in one line, its verdicts are right.

The campaigns themselves take an installed release each: ``make museum``.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

import harness.museum.environments
from harness.cli import main
from harness.commands.museum import Seen, Visit
from harness.museum import Exhibit, ManifestError, Other, exhibits
from harness.museum.environments import MARK, STAMP, NoEnvironment, environment
from harness.targets import mlx_lm_catalogue, mlx_vlm_models
from properties import BY_ID

EXHIBITS = exhibits()
BUG = Exhibit(
    name="a-bug",
    package="mlx-lm",
    buggy=("1.0",),
    fixed="1.1",
    families=("llama",),
    report="ml-explore/mlx-lm#1",
    expected=("positions_are_absolute",),
    says="position 3",
    checked="both sources",
    beside=("mlx",),
    others=(Other(("batches_keep_their_rows",), ("llama",), "row [0-9]+ is lost", "another bug", "Batch"),),
)
HIT = Seen("positions_are_absolute", "given position 3, not 2", 7, 1.5, 2, "Prefill(1) ; Decode(1)")
OTHER = Seen("batches_keep_their_rows", "layer 0: row 3 is lost", 7, 1.5, 2, "Prefill(1) ; Batch(0)")
#: Three findings of the same property that are none of it.
NEW = [
    dataclasses.replace(OTHER, message="layer 0: row 3 is twice there"),
    dataclasses.replace(OTHER, program="Prefill(2)"),
    dataclasses.replace(OTHER, property="positions_are_absolute"),
]
OFF = dataclasses.replace(HIT, message="something else")
SHOWN = frozenset({"positions_are_absolute"})


def visit(version: str, *found: Seen, shown: frozenset[str] = SHOWN) -> Visit:
    return Visit(BUG, version, "llama", 104, 9.0, found, shown)


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_an_entry_names_what_there_is(exhibit: Exhibit) -> None:
    assert {*exhibit.expected, *(name for other in exhibit.others for name in other.properties)} <= set(BY_ID)
    model_types = {family.partition("+")[0] for family in exhibit.families}
    assert model_types <= set({"mlx_lm": mlx_lm_catalogue, "mlx_vlm": mlx_vlm_models}[exhibit.kind].FAMILIES)
    paths = {family.partition("+")[2] for family in exhibit.families}
    assert paths <= ({"", "images"} if exhibit.kind == "mlx_vlm" else {""})
    repository, _, number = exhibit.report.partition("#")
    assert repository.count("/") == 1 and number.isdigit()
    versions = [tuple(map(int, version.split("."))) for version in (*exhibit.buggy, exhibit.fixed)]
    assert versions == sorted(set(versions)), "old ones first, and the mended one behind them"
    assert any("==" in one for one in exhibit.beside), "what is installed beside a release is pinned"
    assert sum(f"{exhibit.package}==1.2" in arguments for arguments in exhibit.installs("1.2")) == 1


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_another_bug_never_hides_all_that_would_show_this_one(exhibit: Exhibit) -> None:
    """What another says is not what this one says, wherever a property is of both."""
    message, program = f"BatchDecode(1) raised ValueError: {exhibit.says}", "Batch(0) ; Batch(0, 1) ; BatchDecode(1)"
    for other in exhibit.others:
        for name in exhibit.expected:
            assert not any(other.explains(family, name, message, program) for family in exhibit.families)


WHOLE = """
beside = ["mlx"]
[bug]
package = "mlx-lm"
buggy = ["1"]
fixed = "2"
families = ["llama"]
report = "a/b#1"
expected = ["p"]
says = "x"
checked = "y"
"""


def test_a_manifest_that_is_whole_is_read(tmp_path: Path) -> None:
    (tmp_path / "m.toml").write_text(WHOLE)
    (one,) = exhibits(tmp_path / "m.toml")
    assert (one.name, one.beside, one.others, one.kind) == ("bug", ("mlx",), (), "mlx_lm")
    other = "others = [{properties = ['p'], families = ['llama'], says = 'x+', why = 'w'}]"
    (tmp_path / "m.toml").write_text(WHOLE.replace('checked = "y"', f'checked = "y"\n{other}'))
    assert exhibits(tmp_path / "m.toml")[0].others == (Other(("p",), ("llama",), "x+", "w"),)


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        ('report = "a/b#1"', "", "bug: the field report is missing"),
        ('says = "x"', 'says = "x"\nodd = 1', "bug: the field odd is unknown"),
        ('buggy = ["1"]', "buggy = []", r"bug: the field buggy is \[\]"),
        ('fixed = "2"', "fixed = 2", "bug: the field fixed is 2"),
        ('checked = "y"', "others = [{properties = ['p']}]\nchecked = 'y'", "bug: the field others"),
        *(
            ('checked = "y"', f"others = [{{{other}}}]\nchecked = 'y'", "bug: the field others")
            for other in (
                "properties = ['p'], families = ['llama'], says = '.*', why = 'w'",  # excuses everything
                "properties = ['p'], families = ['llama'], says = '(', why = 'w'",
                "properties = ['p'], families = ['qwen3'], says = 'x', why = 'w'",  # none of the entry's
                "properties = ['p'], families = ['llama'], says = 'x', why = 'w', programs = ''",
                "properties = ['p'], families = ['llama'], says = 'x', why = 'w', odd = 'y'",
            )
        ),
        ('says = "x"', 'says = "x"\nbare = "no"', "bug: the field bare is 'no'"),
        ("[bug]", "[bug", "m.toml: "),
        ("[bug]", "bug = 1\n[other]", "bug: it is no table"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named(tmp_path: Path, was: str, now: str, says: str) -> None:
    (tmp_path / "m.toml").write_text(WHOLE.replace(was, now))
    with pytest.raises(ManifestError, match=says) as error:
        exhibits(tmp_path / "m.toml")
    assert "\n" not in str(error.value)


def test_no_manifest_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="No such file"):
        exhibits(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("seen", "good", "verdict"),
    [
        (visit("1.0", HIT), True, "found"),
        (visit("1.0", OTHER, HIT), True, "found"),
        (visit("1.0"), False, "MISSED"),
        (visit("1.0", OTHER), False, "MISSED"),
        (visit("1.0", OFF), False, "MISSED"),
        (visit("1.1"), True, "clean"),
        (visit("1.1", OTHER), True, "clean"),
        (visit("1.1", HIT), False, "NOT CLEAN"),
        (visit("1.1", OFF), False, "NOT CLEAN"),
        *((visit("1.1", OTHER, new), False, "NOT CLEAN") for new in NEW),
        (dataclasses.replace(visit("1.1", OTHER), family="qwen3"), False, "NOT CLEAN"),
        (visit("1.1", shown=frozenset()), False, "NOT SHOWN"),
    ],
)
def test_a_verdict_is_what_was_found(seen: Visit, good: bool, verdict: str) -> None:
    assert (seen.good, seen.verdict) == (good, verdict)


MASK, KEYS = "mask_shows_exactly_the_visible_set", "keys_equal_ledger_live_length"
FREE, ROWS, WHOLLY = "outputs_equal_the_cache_free_forward", "batch_rows_equal_solo_runs", "every_operation_completes"
FUTURE = "layer 0: the mask shows the key at position 1 (slot 1) to the token at position 0; 1 of 4 entries are wrong"
#: What mended releases said: entry, family, property, message (its beginning), shrunk program.
SAID = [
    (
        *("rotating-merge", "gemma3_text", MASK),
        "layer 0: the mask hides the key at position 0 (slot 2) to the token at position 9 (window, cache that keeps",
        "s0:Prefill(4) ; Batch(0, 1) ; BatchForward(6) ; BatchDecode(3) ; BatchForward(2)",
    ),
    (
        *("rotating-merge", "gemma3_text", FREE),
        "BatchForward(2), forward 0: the logits of the token at position 2 differ at entry 1: -1.3 from the target",
        "s1:Prefill(11) ; Batch(0, 1) ; BatchDecode(2) ; BatchForward(2)",
    ),
    (
        *("rotating-merge", "gpt_oss", WHOLLY),
        "BatchDecode(1) raised ValueError: [concatenate] All the input array dimensions must match exactly",
        "s0:Prefill(1) ; Batch(1) ; Batch(0, 1, 2) ; BatchDecode(1)",
    ),
    (
        *("rotating-merge", "cohere2", "batches_keep_their_rows"),
        "Batch(0, 1, 2) changed sequence 0: layer 0: the key row in slot 0 (position 0) differs, 0.568 became 0",
        "s0:Prefill(1) ; Batch(1) ; Batch(0, 1, 2)",
    ),
    (  # the row has left the batch, and remembers its padding
        *("cache-list-files", "longcat_flash_ngram", FREE),
        "Decode(1), forward 0: the logits of the token at position 1 differ at entry 7: -1.78 from the target",
        "Batch(0, 1) ; BatchForward(1, 2) ; s0:Decode(1)",
    ),
    (
        *("speculation-over-states", "qwen3_next", WHOLLY),
        "BatchDecode(1) raised ValueError: [concatenate] All the input array dimensions must match exactly",
        "s0:Prefill(1) ; Batch(0) ; Batch(0, 1) ; BatchDecode(1)",
    ),
    (
        *("mrope-chunk-ids", "qwen2_vl", MASK),
        "layer 0: attention (no mask) shows the padding in slot 0 to the token at position 0; 1 of 2 entries are wrong",
        "s0:Prefill(1) ; Batch(0, 1) ; BatchDecode(1)",
    ),
    (
        *("mrope-delta-lost", "qwen2_vl+images", KEYS),
        "layer 0: attention received 2 keys, the sequence holds 0 and the chunk adds 1",
        "Prefill(1, image 1x1@0)",
    ),
    (
        *("mrope-delta-lost", "qwen3_vl+images", ROWS),
        "BatchDecode(1), sequence 1 in a batch of 2: the logits of the token at position 0 are 1.91 deviations away",
        "s0:Prefill(1, image 1x2@0) ; Batch(0, 1) ; BatchDecode(1)",
    ),
]


@pytest.mark.parametrize("said", SAID, ids=lambda said: f"{said[0]}-{said[2]}")
def test_what_mended_releases_said_is_no_news_and_the_same_elsewhere_is(said: tuple[str, ...]) -> None:
    name, *told = said
    (exhibit,) = (one for one in EXHIBITS if one.name == name)
    assert [other for other in exhibit.others if other.explains(*told)]
    for at, odd in enumerate(("llama", "positions_are_absolute", FUTURE, "Prefill(2)")):
        changed = [odd if number == at else was for number, was in enumerate(told)]
        assert not [other for other in exhibit.others if other.explains(*changed)]


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=lambda one: one.name)
def test_an_invented_finding_is_never_clean(exhibit: Exhibit) -> None:
    """Whatever property says it, of whatever family: that plain chunks see the future is a known bug of none."""
    for family in exhibit.families:
        for name in BY_ID:
            seen = Seen(name, FUTURE, 1, 1.0, 1, "Prefill(2)")
            at = Visit(exhibit, exhibit.fixed, family, 104, 9.0, (seen,), frozenset(exhibit.expected))
            assert (at.verdict, at.odd) == ("NOT CLEAN", (seen,))


def test_a_bare_release_is_installed_last_and_without_what_it_asks_for() -> None:
    bare = dataclasses.replace(BUG, bare=True)
    assert BUG.installs("1.0") == (("mlx-lm==1.0", "mlx"),)
    assert bare.installs("1.0") == (("mlx",), ("--no-deps", "mlx-lm==1.0"))


def test_the_list_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["museum", "--list", "--venvs", "/dev/null"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[::2]] == [one.name for one in EXHIBITS]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "no-such-bug"], f"argument --only: no bug 'no-such-bug'; there are {EXHIBITS[0].name}"),
        (["--only", ","], "argument --only: names no bug"),
        (["--seed", "-1"], "argument --seed: must lie in"),
        (["--out", "/dev/null/x"], "cannot write reports: /dev/null"),
        (["--venvs", "/dev/null/x"], "cannot make an environment in /dev/null/x/"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert main(["museum", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"kv-harness: error: {says}") and error.count("\n") == 1


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(NoEnvironment, match="it holds what is not ours"):
        environment(tmp_path, [["mlx-lm==1"]])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_install_that_fails_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "no-index"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(NoEnvironment, match=r"cannot install mlx-lm==0\.0\.0: ERROR: No matching") as error:
        environment(tmp_path / "venv", [["mlx-lm==0.0.0"]])
    assert "\n" not in str(error.value)
    assert (tmp_path / "venv" / MARK).is_file() and not (tmp_path / "venv" / STAMP).exists()


def test_an_environment_is_made_once_and_reaches_this_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = []

    def run(command: list[str], what: str) -> None:
        made.append(what)
        if command[1:3] == ["-m", "venv"]:
            python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
            (Path(command[3]) / "lib" / python / "site-packages").mkdir(parents=True)

    monkeypatch.setattr(harness.museum.environments, "_run", run)
    folder = tmp_path / "one"
    python = environment(folder, [["a==1", "b"]])
    assert python == folder / "bin" / "python" and made == ["make an environment", "install a==1"]
    assert environment(folder, [["a==1", "b"]]) == python and len(made) == 2
    (added,) = folder.rglob("*.pth")
    assert (Path(added.read_text().strip()) / "harness" / "wire" / "worker.py").is_file()
    environment(folder, [["a==2", "b"]])  # other requirements
    assert len(made) == 4
    (folder / STAMP).unlink()  # an install that was interrupted
    environment(folder, [["a==2", "b"]])
    assert len(made) == 6
