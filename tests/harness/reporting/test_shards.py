"""A run in parts: the parts are the whole, in whatever order they are put together, and one that is missing is told."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from harness import cli
from harness.campaign import run_campaign, shares_of
from harness.findings import Verdict
from harness.judging import Evidence
from harness.profiles import PROFILES, Profile
from harness.reporting import load_schema
from harness.reporting.issue import MOST, issue_markdown
from harness.reporting.shards import Shard, ShardError, shard_of, whole_record
from harness.runner import family_targets
from harness.tally import Tally, target_label
from properties import ALL, BY_ID

FAMILY, N = "nemotron_nas", 3
TINY = Profile("quick", programs=20, operations=4, shrink=False, least=2, patience=1, configurations=1)
MASK = "mask_key_axis_equals_live_keys"
VALIDATOR = jsonschema.Draft202012Validator(load_schema())
Record = dict[str, Any]


@pytest.mark.parametrize("of", [1, 2, 3, 7, 40])
def test_every_configuration_is_in_one_shard(of: int) -> None:
    dealt = [list(Shard(number, of).of_these(17)) for number in range(1, of + 1)]
    assert sorted(number for shard in dealt for number in shard) == list(range(17))
    assert all(abs(len(one) - len(other)) <= 1 for one in dealt for other in dealt)


@pytest.mark.parametrize("text", ["", "3", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1 / 2", "1/1001", "1/\u0662"])
def test_what_is_no_shard(text: str) -> None:
    with pytest.raises(ShardError, match="must be I/N"):
        shard_of(text)
    assert str(shard_of("2/8")) == "2/8"


class _Programs(Tally):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[tuple[str, str]] = []

    def on_end(self, evidence: Evidence) -> None:
        self.drawn.append((target_label(evidence.run.target), str(evidence.run.program)))


def test_the_programs_of_all_shards_are_those_of_the_whole() -> None:
    targets = family_targets(FAMILY, "live", TINY, 5)
    shares, judges = shares_of(targets, TINY), [BY_ID["every_operation_completes"]]
    whole, parts = _Programs(), []
    run_campaign(FAMILY, targets, judges, TINY, 5, also=whole)
    for number in range(1, N + 1):
        mine, seen = Shard(number, N).of_these(len(targets)), _Programs()
        run_campaign(
            *(FAMILY, [targets[at] for at in mine], judges, TINY, 5),
            also=seen,
            shares=[shares[at] for at in mine],
            numbers=mine,
        )
        parts += seen.drawn
    assert sorted(parts) == sorted(whole.drawn) and len(whole.drawn) >= 2 * len(targets)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Path]]:
    """``folders(policy)``: of a whole run, and of each of its N shards."""
    made: dict[str, list[Path]] = {}

    def make(policy: str) -> list[Path]:
        if policy not in made:
            made[policy] = [tmp_path_factory.mktemp(policy) for _ in range(N + 1)]
            for number, out in enumerate(made[policy]):
                shard = ["--shard", f"{number}/{N}"] if number else []
                options = ["--policy", policy, "--no-strict", "--out", str(out), *shard]
                code = cli.main(["run", "--families", FAMILY, "--path", "text", *options])
                assert code == (policy == "offset")
        return made[policy]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PROFILES, "quick", TINY)
        yield make  # type: ignore[misc]


def _file(policy: str) -> str:
    return f"{FAMILY}{'' if policy == 'live' else '@offset-mask'}.json"


def _merged(out: Path, *folders: Path) -> Record:
    merge = [argument for folder in folders for argument in ("--merge", str(folder))]
    assert cli.main(["report", "--out", str(out), *merge]) == 0
    (record,) = out.glob("families/*.json")
    data: Record = json.loads(record.read_text())
    VALIDATOR.validate(data)
    return data


def test_shards_make_the_record_of_the_whole_run(folders: Callable[[str], list[Path]], tmp_path: Path) -> None:
    whole, *shards = folders("live")
    wanted = json.loads((whole / "families" / _file("live")).read_text())
    made = _merged(tmp_path, *shards)
    assert made.pop("shards") == {"of": N, "numbers": [1, 2, 3]}
    assert made.pop("seconds") > 0 < wanted.pop("seconds")
    assert made.pop("control") | {"seconds": 0} == wanted.pop("control") | {"seconds": 0}
    for row in (*made["properties"], *wanted["properties"]):
        row.pop("reason")  # names the configurations of every shard by itself
    assert made == wanted  # verdict, every property, every count, the command
    assert sum(one["programs"] for one in made["configurations"]) == made["programs"] > 0
    page = (tmp_path / "families" / f"{FAMILY}.md").read_text()
    assert "| shards " in page and "1, 2, 3 of 3" in page


def test_shards_that_find_something_fail_as_the_whole_does(
    folders: Callable[[str], list[Path]], tmp_path: Path
) -> None:
    whole, *shards = folders("offset")
    wanted = json.loads((whole / "families" / _file("offset")).read_text())
    made = _merged(tmp_path, *shards)
    broken = {found["property"] for found in wanted["findings"]}
    assert made["verdict"] == wanted["verdict"] == "FAIL" and MASK in broken
    assert broken <= {found["property"] for found in made["findings"]}
    names = [found["property"] for found in made["findings"]]
    assert len(names) == len(set(names))
    for found in made["findings"]:
        assert cli.main(["replay", str(tmp_path / "findings" / Path(found["replay"].split()[-1]).name)]) == 1


def _texts(out: Path) -> dict[str, str]:
    return {str(path.relative_to(out)): path.read_text() for path in sorted(out.rglob("*.*"))}


def test_any_order_and_twice_is_the_same(folders: Callable[[str], list[Path]], tmp_path: Path) -> None:
    _, one, two, three = folders("live")
    texts = []
    for number, order in enumerate(((one, two, three), (three, one, two), (two, two, three, one, one))):
        _merged(tmp_path / str(number), *order)
        texts.append(_texts(tmp_path / str(number)))
    half = tmp_path / "half"
    assert _merged(half, three)["verdict"] == "INCONCLUSIVE"
    whole = tmp_path / "whole"
    _merged(whole, half, one)
    _merged(whole, two, half)
    _merged(whole, whole)
    texts.append(_texts(whole))
    assert texts[0] == texts[1] == texts[2] == texts[3]


def test_a_shard_that_is_missing_is_told(
    folders: Callable[[str], list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, one, _, three = folders("live")
    made = _merged(tmp_path, one, three)
    assert (made["verdict"], made["partial"]) == ("INCONCLUSIVE", True)
    assert made["verdict_reason"] == "shards missing: 2 of 3"
    assert "INCONCLUSIVE: shards missing: 2 of 3" in capsys.readouterr().out
    assert "shards missing: 2 of 3" in (tmp_path / "families" / f"{FAMILY}.md").read_text()


def test_history_and_issue(folders: Callable[[str], list[Path]], tmp_path: Path) -> None:
    _, one, two, three = folders("offset")
    issue = tmp_path / "issue.md"
    lines = []
    for _ in range(2):
        assert (
            cli.main(
                ["report", "--out", str(tmp_path / "o"), "--history", "--issue", str(issue)]
                + [argument for folder in (one, two, three) for argument in ("--merge", str(folder))]
            )
            == 0
        )
        lines.append((tmp_path / "o" / "history.jsonl").read_text())
    assert lines[0] == lines[1] and lines[0].count("\n") == 1
    text = issue.read_text()
    assert f"## `reference:{FAMILY}`: FAIL" in text and f"### `{MASK}`" in text
    assert "kv-harness replay" in text and "program   " in text and "--policy offset" in text


def _shard(record: Record, number: int, of: int = 2) -> Record:
    made = copy.deepcopy(record) | {"shards": {"of": of, "numbers": [number]}}
    made["coverage"]["blind_forwards"] = 0
    return made


def test_records_that_are_not_shards_of_one_run_are_refused(
    records: dict[str, Record],
    folders: Callable[[str], list[Path]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two = _shard(records["pass"], 1), _shard(records["pass"], 2)
    assert whole_record([two, one])["verdict"] == "PASS"
    elsewhere = {**two["versions"], "platform": "another", "python": "3.99", "pytest": "absent"}
    assert whole_record([one, two | {"versions": elsewhere}])["verdict"] == "PASS"  # none of these decides a result
    for change, words in (
        ({"seed": 99}, "of different runs: seed 5 and 99"),
        ({"shards": {"of": 3, "numbers": [2]}}, "of different divisions: into 2 and into 3"),
        ({"shards": {"of": 2, "numbers": [1]}}, "a shard is there twice"),
        ({"versions": {**two["versions"], "mlx": "0.1"}}, "of different versions: mlx"),
        ({"versions": {**two["versions"], "mlx-lm": "0.1"}}, "of different versions: mlx-lm None and 0.1"),
        ({"device": "another"}, "of different runs: device cpu and another"),
        (
            {"budget": {**two["budget"], "programs": 8}},
            f"of different runs: programs {two['budget']['programs']} and 8",
        ),
        ({"configurations": two["configurations"][1:]}, "their configurations or properties"),
    ):
        with pytest.raises(ShardError, match=words):
            whole_record([one, two | change])
    out = tmp_path / "o"
    shutil.copytree(folders("live")[1], out)
    (first,) = (out / "shards" / "families" / FAMILY).glob("*.json")
    first.with_name("2-of-3.json").write_text(json.dumps(json.loads(first.read_text()) | {"seed": 7}))
    capsys.readouterr()
    assert cli.main(["report", "--out", str(out)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no shards of one run: of different runs: seed" in said


@pytest.mark.parametrize(
    ("other", "verdict"),
    [
        ("pass", Verdict.PASS),
        ("fail", Verdict.FAIL),
        ("fail of the same property", Verdict.FAIL),
        ("vacuous", Verdict.VACUOUS),
        ("inconclusive", Verdict.INCONCLUSIVE),
        ("not applicable", Verdict.PASS),
        ("partial", Verdict.INCONCLUSIVE),
        ("fail, partial", Verdict.FAIL),
        ("control missed", Verdict.PASS),  # the other one caught it, on the same configurations
    ],
)
def test_the_worst_shard_decides(records: dict[str, Record], other: str, verdict: Verdict) -> None:
    pair = [_shard(records["pass"], 1), _shard(records[other], 2)]
    made = whole_record(pair)
    VALIDATOR.validate(made)
    assert made["verdict"] == verdict.value, made["verdict_reason"]
    assert made == whole_record(pair[::-1])
    assert made["programs"] == sum(record["programs"] for record in pair)


def test_kinds_of_decisive_steps_are_summed(records: dict[str, Record]) -> None:
    first, second = _shard(records["pass"], 1), _shard(records["pass"], 2)
    first["properties"][0]["kinds"] = {"one": 3}
    second["properties"][0]["kinds"] = {"one": 4, "other": 1}
    made = whole_record([first, second])
    VALIDATOR.validate(made)
    assert made["properties"][0]["kinds"] == {"one": 7, "other": 1} and "kinds" not in made["properties"][1]


def test_what_one_shard_could_not_see_counts_for_all(records: dict[str, Record]) -> None:
    clear = _shard(records["pass"], 1)
    blind = _shard(records["pass"], 2)
    for record, hidden in ((clear, 0), (blind, 3)):
        record["coverage"]["blind_forwards"] = hidden
    rows = {row["id"]: row["verdict"] for row in whole_record([clear, blind])["properties"]}
    assert rows[MASK] == "INCONCLUSIVE" and rows["every_operation_completes"] == "PASS"
    assert set(rows) == {prop.id for prop in ALL}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--shard", "4/3"], "argument --shard: must be I/N"),
        (["--shard", "1/2", "--profile", "nightly"], "argument --shard: all shards need the same --seed"),
        (["--shard", "1/2", "--history"], "argument --history: belongs to kv-harness report"),
    ],
)
def test_what_cannot_be_sharded(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--families", FAMILY, *options]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said


def test_an_issue_names_what_is_not_pass_and_has_a_limit(records: dict[str, Record]) -> None:
    assert issue_markdown([records["pass"]]) == "" == issue_markdown([])
    long = copy.deepcopy(records["fail"])
    long["findings"] = [long["findings"][0] | {"message": "x" * 5000} for _ in range(40)]
    text = issue_markdown([long, records["pass"], records["vacuous"]])
    assert len(text) <= MOST and "2 reports of 3 are not PASS." in text
    assert "sections more: see the reports of the run." in text.splitlines()[-1]


def test_an_issue_leaves_out_what_is_recorded_and_what_others_do_every_night(records: dict[str, Record]) -> None:
    known = {**records["fail"], "verdict": "KNOWN", "target": "mlx_lm:known"}
    quiet = {**records["vacuous"], "target": "mlx_lm:quiet"}
    assert issue_markdown([known, quiet, records["pass"]]) == ""
    news = {**records["fail"], "target": "mlx_lm:news"}
    cut = {**records["vacuous"], "verdict": "INCONCLUSIVE", "target": "mlx_lm:cut"}
    text = issue_markdown([known, quiet, records["pass"], news, cut])
    assert "2 reports of 5 are not PASS." in text and "and no news: 1 KNOWN, 1 VACUOUS." in text
    assert "mlx_lm:news" in text and "mlx_lm:cut" in text and "mlx_lm:known" not in text and "mlx_lm:quiet" not in text


def test_a_shard_without_a_configuration_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--families", FAMILY, "--shard", "999/999", "--out", str(tmp_path)]) == 0
    assert "nothing was judged: no configuration is in shard 999/999\n" in capsys.readouterr().out
