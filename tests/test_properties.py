"""The main job as a test: every family, every property, and the planted bugs that prove that they bite.

Thin on purpose. What is drawn, run and judged lives in ``harness`` and ``properties``; budgets in the profiles.
"""

from __future__ import annotations

import dataclasses

import pytest

import properties
from harness.campaign import run_campaign
from harness.faults import FAULTS, IMAGE_FAULTS, OF_OUTPUTS, VARIATIONS, Fault
from harness.findings import Verdict
from harness.operations import BATCHES
from harness.profiles import PROFILES
from harness.reporting.coverage import WITH_IMAGES
from harness.target import Path
from harness.targets.reference import FAMILIES, ReferenceTarget, paths, targets

SEED = 20_26
QUICK = PROFILES["quick"]
# Where a test asks who finds a bug, and not how small it gets, nor whether a quick run comes to it: that some need the
# thousandth position or a ring that has gone round is a matter of draws, and the kill matrix measures those.
FOUND = dataclasses.replace(QUICK, shrink=False, far=4)
FEW = dataclasses.replace(QUICK, programs=16, least=8, of_a_kind=0)  # for two configurations
WINDOWED = [family for family in FAMILIES if any(any(target.windows) for target in targets(family))]
RUNS = [(family, path) for family in FAMILIES for path in paths(family)]
WITH_VISION = [family for family, path in RUNS if path == "images"]
OUTPUTS = {prop.id for prop in properties.ALL if prop.id.startswith("outputs_")}
BOUND = "quantised_rows_stay_within_their_bound"  # of caches that are quantised, it sees the rows as well
RETOLD = {"rollback_equals_never_speculated", "chunks_equal_one_shot", "batch_rows_equal_solo_runs"}


def shown_on(fault: Fault, family: str, path: Path = "text") -> list[ReferenceTarget]:
    """The configurations of a family on which a fault can be seen at all."""
    return [target for target in targets(family, path=path, far=True) if fault.shown_on(target)]


def families_of(fault: Fault) -> list[tuple[str, Path]]:
    path: Path = "images" if fault in IMAGE_FAULTS else "text"
    return [(family, path) for family in FAMILIES if shown_on(fault, family, path)]


@pytest.mark.parametrize(("family", "path"), RUNS)
def test_the_live_mask_is_right(family: str, path: Path) -> None:
    """Every property holds and met a decisive step, on two configurations; ``make run`` takes all of them."""
    result = run_campaign(f"{family}_{path}", targets(family, path=path)[1:3], properties.ALL, FEW, SEED)
    assert [bug.finding.text() for bug in result.found] == []
    assert {row.id: row.verdict for row in result.properties} == {prop.id: Verdict.PASS for prop in properties.ALL}
    assert all(row.tally.decisive_steps > 0 for row in result.properties)


@pytest.mark.parametrize("path", ["text", "images"])
def test_the_programs_reach_the_states_that_matter(path: Path) -> None:
    """All that a report counts, in one quick run. Judges draw nothing: those that run programs again rest."""
    judges = [prop for prop in properties.ALL if "judge_run" not in type(prop).__dict__]
    result = run_campaign(f"states_{path}", targets("qwen2_vl", path=path)[::3], judges, QUICK, SEED)
    cover = result.tally.coverage
    assert cover.programs >= 100
    reached = cover.to_json()
    never = ["stopped_by_error", "blind_forwards", *(WITH_IMAGES if path == "text" else ())]
    assert [name for name, count in reached.items() if count == 0] == never


@pytest.mark.parametrize(("family", "path"), RUNS)
def test_the_offset_mask_is_found(family: str, path: Path) -> None:
    """The bug that started it all, found by the ordinary campaign and shrunk to what a person would write."""
    result = run_campaign(family, targets(family, "offset", path=path)[:2], properties.ALL, FEW, SEED)
    found = {bug.finding.property_id: bug for bug in result.found}
    expected = {"mask_key_axis_equals_live_keys", "every_operation_completes"}
    assert set(found) >= expected
    for other in set(found) - expected:  # in a batch alone the wrong width can fit, and then the content is wrong
        assert any(isinstance(op, BATCHES) for op in found[other].finding.program.operations), other
    mask = found["mask_key_axis_equals_live_keys"]
    assert mask.reproducible
    assert len(mask.finding.program.operations) <= 3
    assert result.verdict is Verdict.FAIL


def families_for(fault: Fault) -> list[str]:
    """One where it shows, and of the first bug of a property three; ``make faults`` plants all everywhere."""
    shown = [family for family, _ in families_of(fault)]
    first = next(other for other in FAULTS if other.breaks == fault.breaks)
    start = FAULTS.index(fault) % len(shown)
    return [*shown[start:], *shown[:start]][: 3 if fault is first else 1]


@pytest.mark.parametrize(
    ("family", "fault"),
    [pytest.param(family, fault, id=f"{family}-{fault.id}") for fault in FAULTS for family in families_for(fault)],
)
def test_a_planted_bug_is_found_by_its_property(family: str, fault: Fault) -> None:
    """The property that a fault names finds it alone, without the help of the others."""
    assert fault.breaks is not None
    with fault.plant():
        result = run_campaign(
            f"{family}_{fault.id}",
            shown_on(fault, family),
            [properties.BY_ID[fault.breaks]],
            FOUND,
            SEED,
            first_only=True,
            attempts=0,
        )
    assert [bug.finding.property_id for bug in result.found] == [fault.breaks], result.tally.coverage


def test_some_family_has_windows() -> None:
    """Or the faults of sliding windows would be planted nowhere."""
    assert WINDOWED == ["cohere2", "olmo3", "qwen2_vl"]


@pytest.mark.parametrize(
    ("family", "fault"),
    [
        pytest.param(family, fault, id=f"{family}-{fault.id}")
        for fault in IMAGE_FAULTS
        for family, _ in families_of(fault)[IMAGE_FAULTS.index(fault) % 2 :][:2]
    ],
)
def test_a_planted_bug_of_the_image_path_is_found_there(family: str, fault: Fault) -> None:
    assert fault.breaks is not None
    prop = [properties.BY_ID[fault.breaks]]
    with fault.plant():
        on = shown_on(fault, family, "images")
        result = run_campaign(f"{family}_{fault.id}", on, prop, FOUND, SEED, first_only=True, attempts=0)
    assert [bug.finding.property_id for bug in result.found] == [fault.breaks], result.tally.coverage
    assert result.found[0].reproducible


@pytest.mark.parametrize("fault", IMAGE_FAULTS, ids=lambda fault: fault.id)
def test_a_planted_bug_of_the_image_path_is_not_to_be_seen_on_text(fault: Fault) -> None:
    """Why each path has a verdict of its own: the text campaign passes all of these."""
    family = WITH_VISION[IMAGE_FAULTS.index(fault) % len(WITH_VISION)]
    vision = [target for target in targets(family) if target.variant.reads_images][:1]
    with fault.plant():
        result = run_campaign(f"{family}_{fault.id}", vision, properties.ALL, FEW, SEED)
    assert result.verdict is Verdict.PASS


@pytest.mark.parametrize("fault", OF_OUTPUTS, ids=lambda fault: fault.id)
def test_a_planted_bug_of_the_outputs_is_seen_by_nothing_else(fault: Fault) -> None:
    """All properties but those that compare logits hold while the model computes something else."""
    of = families_of(fault)
    family, path = of[OF_OUTPUTS.index(fault) % len(of)]
    on = shown_on(fault, family, path)[:2]
    others = [prop for prop in properties.ALL if prop.id not in OUTPUTS | RETOLD | {BOUND}]
    with fault.plant():
        result = run_campaign(f"{family}_{fault.id}", on, others, FEW, SEED)
    assert [bug.finding.text() for bug in result.found] == []


def test_every_property_has_a_planted_bug() -> None:
    """The offset policy is the planted bug of the first property; every other one has a fault."""
    covered = {fault.breaks for fault in FAULTS} | {"mask_key_axis_equals_live_keys"}
    assert covered == set(properties.BY_ID)


@pytest.mark.parametrize("variation", VARIATIONS, ids=lambda fault: fault.id)
def test_a_harmless_variation_is_not_reported(variation: Fault) -> None:
    """Another right way to write the same mask: no finding, and no property loses its decisive steps."""
    number = VARIATIONS.index(variation)
    family = [family for family in FAMILIES if shown_on(variation, family)][number % len(families_of(variation))]
    with variation.plant():
        for path in paths(family):
            on = shown_on(variation, family, path)[:1]
            result = run_campaign(f"{family}_{variation.id}", on, properties.ALL, FEW, SEED)
            assert [bug.finding.text() for bug in result.found] == []
            assert {row.verdict for row in result.properties} == {Verdict.PASS}
