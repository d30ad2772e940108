"""A seed fixes the programs: here, in another process, and where CI is set."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from kv_harness_fake_target import FakeTarget

import properties
from harness.campaign import run_campaign
from harness.judging import Evidence, Judgement, Property
from harness.profiles import PROFILES, Profile
from harness.seeds import derive_seed

PROFILE = Profile("p", programs=15, operations=6, shrink=False, patience=1)
NAMES = [(name, number, search) for name in ("a", "b", "a0") for number in (0, 1, 10) for search in (0, 1, 10)]
ROOT = Path(__file__).parents[2]

PROGRAM = """
import importlib.util, sys
for name in ("fake_attention", "fake_bugs", "fake_batch", "fake_copies", "fake_target"):
    spec = importlib.util.spec_from_file_location(f"kv_harness_{name}", f"{sys.argv[1]}/{name}.py")
    module = sys.modules[f"kv_harness_{name}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
spec = importlib.util.spec_from_file_location("seeds", sys.argv[2])
seeds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(seeds)
exec(sys.argv[3])
print("\\n".join(seeds.programs("alpha", int(sys.argv[4]))))
"""


class Recorder(Property):
    """Judges nothing and remembers every program."""

    id = "recorder"
    sentence = "Remembers every program."
    decisive_when = "never"

    def __init__(self) -> None:
        self.programs: list[str] = []

    def judge_run(self, evidence: Evidence) -> Judgement:
        self.programs.append(str(evidence.run.program))
        return Judgement()


def programs(name: str, seed: int, profile: Profile = PROFILE, **named: Any) -> list[str]:
    recorder = Recorder()
    run_campaign(name, [FakeTarget()], [recorder], profile, seed, **named)
    return recorder.programs


def test_the_same_seed_gives_the_same_programs() -> None:
    first = programs("alpha", 7)
    assert len(first) >= PROFILE.programs and len(set(first)) > PROFILE.programs / 2
    assert programs("alpha", 7) == first


def test_another_seed_or_family_gives_other_programs() -> None:
    first = set(programs("alpha", 7))
    for other in (programs("alpha", 8), programs("beta", 7), programs("alpha_control", 7)):
        assert len(first & set(other)) < len(first) / 3


def in_a_fresh_process(seed: int, hash_seed: str, ci: str | None = None, before: str = "") -> list[str]:
    """The programs of a process of its own, which first executes ``before``."""
    env = {name: value for name, value in os.environ.items() if name not in ("CI", "GITHUB_ACTIONS", "TF_BUILD")}
    env |= {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": hash_seed} | ({"CI": ci} if ci else {})
    arguments = [str(Path(__file__).parent), __file__, before, str(seed)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, env=env, cwd="/", check=True
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize("ci", [None, "true"])
def test_a_fresh_process_gives_the_same_programs_also_under_ci(ci: str | None) -> None:
    """Two fresh processes: what this one has imported so far depends on the tests that ran before (see below)."""
    assert in_a_fresh_process(7, "random", ci) == in_a_fresh_process(7, "1")


def test_other_families_before_it_do_not_change_the_programs_of_a_family() -> None:
    assert in_a_fresh_process(7, "2", before='seeds.programs("beta", 3)') == in_a_fresh_process(7, "1")


def test_a_module_that_happens_to_be_loaded_does_not_change_the_programs(tmp_path: Path) -> None:
    """The "same run again" of a report needs it: an installed harness and a checkout load different local modules."""
    (tmp_path / "literals.py").write_text(f"NUMBERS = {[*range(100, 400), 4096, 10_001]}\n")
    load = f"sys.path.insert(0, {str(tmp_path)!r}); import literals"
    assert in_a_fresh_process(0, "1", before=load) == in_a_fresh_process(0, "1")


def test_two_seeds_differ_under_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hypothesis's own "ci" profile derandomises, and a nightly would repeat itself for ever."""
    before = settings.default
    settings.register_profile("like-ci", derandomize=True, database=None, max_examples=3)
    try:
        settings.load_profile("like-ci")
        one, two = programs("alpha", 1), programs("alpha", 2)
    finally:
        settings.register_profile("before", before)
        settings.load_profile("before")
    assert len(one) >= PROFILE.programs and one != two and one == programs("alpha", 1)


def test_every_search_has_programs_of_its_own() -> None:
    """The seed is derived from family, configuration and search: further searches must not repeat the first."""
    profile = Profile("p", programs=8, operations=6, shrink=False, patience=2)
    drawn = programs("alpha", 7, profile)  # the recorder is never decisive, so there are three searches
    assert len(drawn) >= 24
    first, second, third = (set(drawn[start : start + 8]) for start in (0, 8, 16))
    assert first - second and first != third and second != third


def test_a_program_is_no_variation_of_the_one_before() -> None:
    """Hypothesis's own backend runs a few near copies of every program that it draws, which say little more."""
    drawn = programs("alpha", 7, Profile("p", programs=60, operations=6, shrink=False, patience=0))
    beginnings = [tuple(program.split(" ; ")[:4]) for program in drawn]
    assert sum(one == other for one, other in pairwise(beginnings)) <= 3
    assert len(set(beginnings)) >= 50


def test_derived_seeds_are_distinct_and_stable() -> None:
    seeds = {derive_seed(base, *names) for base in (0, 1) for names in NAMES}
    assert len(seeds) == 2 * len(NAMES) and all(0 <= seed < 2**64 for seed in seeds)
    assert derive_seed(1, "a") != derive_seed(11, "a") and derive_seed(0, "a", "b") != derive_seed(0, "ab")


@pytest.mark.parametrize("profile", PROFILES.values(), ids=list(PROFILES))
def test_a_profile_sets_everything_that_ci_would_change(profile: Profile, tmp_path: Path) -> None:
    made = profile.settings(tmp_path)
    assert (made.max_examples, made.stateful_step_count) == (profile.programs, profile.operations)
    assert made.derandomize is False and made.deadline is None and made.report_multiple_bugs is False
    assert set(made.suppress_health_check) == set(HealthCheck)
    assert (made.database is not None) == profile.remember
    assert (Phase.shrink in made.phases) == profile.shrink and (Phase.reuse in made.phases) == profile.remember
    assert Phase.explicit not in made.phases and Phase.explain not in made.phases
    assert profile.settings().database is None
    assert profile.least >= 1 and profile.patience >= (profile.name != "smoke")


def test_the_example_database_remembers_what_failed(tmp_path: Path) -> None:
    target = FakeTarget(policy="offset")
    profile = Profile("p", programs=12, operations=6, remember=True)
    chosen = [properties.BY_ID["mask_key_axis_equals_live_keys"]]
    first = run_campaign("fake", [target], chosen, profile, 1, database=tmp_path, first_only=True)
    assert first.found and any(tmp_path.rglob("*"))
    again = run_campaign("fake", [target], chosen, profile, 2, database=tmp_path, first_only=True)
    assert again.found[0].after == 1  # tried first, whatever the seed
    none = run_campaign("fake", [target], chosen, PROFILE, 2, database=tmp_path, first_only=True)
    assert none.found and none.found[0].finding.property_id == chosen[0].id
