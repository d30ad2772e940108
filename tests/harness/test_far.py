"""Programs that are far from small: what they reach that ordinary ones do not, and who is judged by them alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest

import properties
from harness.campaign import CampaignResult, is_far, run_campaign, shares_of
from harness.faults import FAULTS
from harness.findings import Verdict
from harness.judging import Evidence, Property
from harness.operations import BatchForward, QuantizeCache, Restore, Rollback, Snapshot, TrimFront
from harness.profiles import PROFILES, Profile
from harness.tally import Tally
from harness.targets import naming
from harness.targets.reference import ReferenceTarget, targets
from harness.targets.reference_caches import FAR
from reference_models.engine import CachePool
from reference_models.registry import variants

QUICK = PROFILES["quick"]
VARIANT = variants("mistral4")[0]
DENSE = ReferenceTarget(VARIANT)
WIDE = [target for target in targets("mistral4", far=True) if is_far(target)]
ONLY_FAR = Profile("far", programs=1, operations=6, shrink=False, least=1, of_a_kind=60, patience=0, far=4)


class Reached(Tally):
    """Counts programs by what they came to."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[str] = []
        self.counts: Counter[str] = Counter()

    def on_end(self, evidence: Evidence) -> None:
        run = evidence.run
        states = {f"{len(step.rows)} rows" for step in run.steps if isinstance(step.operation, BatchForward)}
        slots: list[int] = []
        for before, step in zip([None, *run.steps], run.steps, strict=False):
            operation, live = step.operation, step.after.live_len
            states |= {f"over {edge} keys" for edge in (256, 512) if live > edge}
            states |= {f"position {edge}" for edge in (256, 1024) if step.after.offset > edge}
            if isinstance(operation, QuantizeCache) and step.effective and live > 256:
                states.add("quantised over 256 keys")
            if isinstance(operation, Snapshot):
                slots.append(operation.slot)
            if isinstance(operation, Restore) and step.effective and slots and operation.slot != slots[-1]:
                states.add("restored from another slot than the last one")
            gap = before is not None and len(step.before.held) > 1
            if isinstance(operation, Rollback) and gap and len(step.after.held) == 1 and live:
                states.add("rolled back over a gap")
            if isinstance(operation, TrimFront) and step.expected_removed and len(step.rows) > 3:
                states.add("trimmed in a batch of four")
        self.programs.append(str(run.program))
        self.counts.update(states)


def run(
    on: Sequence[ReferenceTarget], profile: Profile, judges: Sequence[Property] = (), seed: int = 3
) -> tuple[CampaignResult, Reached]:
    seen = Reached()
    return run_campaign("far", on, judges, profile, seed, also=seen), seen


def found(on: Sequence[ReferenceTarget], profile: Profile, judges: Sequence[Property]) -> bool:
    """Is there a finding, however large?"""
    return bool(run_campaign("far", on, judges, profile, 3, first_only=True, attempts=0).found)


def test_programs_that_are_far_from_small_reach_what_ordinary_ones_do_not() -> None:
    ordinary = dataclasses.replace(QUICK, programs=60, far=0)
    small = run([DENSE], ordinary)[1]
    large = run([DENSE], dataclasses.replace(QUICK, programs=1, least=1, of_a_kind=0, far=1, operations=8), seed=4)[1]
    assert len(small.programs) >= 60
    assert not {"over 512 keys", "position 1024", "4 rows"} & set(small.counts)
    many = run(WIDE, ONLY_FAR)[1]
    everything = many.counts + large.counts
    for state in (
        "over 512 keys",
        "position 1024",
        "quantised over 256 keys",
        "restored from another slot than the last one",
    ):
        assert everything[state], state


def test_a_crowd_gathers_trims_and_goes_back_over_gaps() -> None:
    seen = run([DENSE], dataclasses.replace(QUICK, programs=40, least=40, of_a_kind=0, far=1))[1]
    for state in ("4 rows", "5 rows", "6 rows", "trimmed in a batch of four", "rolled back over a gap"):
        assert seen.counts[state], (state, seen.counts)


def test_the_seed_decides_them_and_ordinary_programs_stay_what_they_are() -> None:
    with_them = run([DENSE], dataclasses.replace(QUICK, programs=10, least=10, of_a_kind=0, far=5))[1].programs
    again = run([DENSE], dataclasses.replace(QUICK, programs=10, least=10, of_a_kind=0, far=5))[1].programs
    without = run([DENSE], dataclasses.replace(QUICK, programs=10, least=10, of_a_kind=0, far=0))[1].programs
    assert with_them == again and with_them[: len(without)] == without
    assert len(with_them) == len(without) + 3  # 10 / 5, and the simplest of all


@pytest.mark.parametrize("target", WIDE, ids=FAR)
def test_wide_caches_are_judged_and_nothing_is_found(target: ReferenceTarget) -> None:
    result, _ = run([target], ONLY_FAR, properties.ALL)
    assert [bug.finding.text() for bug in result.found] == []
    verdicts = {row.id: row.verdict for row in result.properties}
    assert set(verdicts.values()) <= {Verdict.PASS, Verdict.NOT_APPLICABLE}
    for name in ("mask_shows_exactly_the_visible_set", "cached_rows_stay_what_they_were", "outputs_equal_the_witness"):
        assert verdicts[name] is Verdict.PASS


def test_few_programs_make_nothing_vacuous_beside_others() -> None:
    """Wide caches get a handful of programs: what no such program meets is judged on the other configurations."""
    profile = dataclasses.replace(QUICK, programs=30, least=30, of_a_kind=0, far=60)
    both = run([DENSE, *WIDE], profile, properties.ALL)[0]
    alone = run([DENSE], profile, properties.ALL)[0]
    assert [row.verdict for row in both.properties] == [row.verdict for row in alone.properties]
    nothing = run(WIDE, dataclasses.replace(profile, far=0), properties.ALL)[0]
    assert {row.verdict for row in nothing.properties} == {Verdict.NOT_APPLICABLE}
    assert nothing.verdict is Verdict.VACUOUS


def test_wide_caches_take_no_programs_from_the_others() -> None:
    alone, both = targets("olmo3"), targets("olmo3", far=True)
    assert [target.storage for target in both if is_far(target)] == list(FAR)
    assert shares_of(both, QUICK)[: len(alone)] == shares_of(alone, QUICK)
    assert set(shares_of(both, QUICK)[len(alone) :]) == {0}
    assert all(QUICK.far_of(0) > QUICK.far_of(share) > 1 for share in shares_of(alone, QUICK))
    assert PROFILES["smoke"].far == 0 == PROFILES["smoke"].far_of(20)


def test_who_asks_for_them_by_name_gets_them() -> None:
    for asked in (naming.Asked(), naming.Asked(far=True)):
        subject = naming.resolve(f"reference:mistral4:{WIDE[0].variant.name}:{FAR[0]}", asked)
        assert subject.targets == (WIDE[0],)
    assert not any(map(is_far, naming.resolve("reference:mistral4", naming.Asked()).targets))
    assert any(map(is_far, naming.resolve("reference:mistral4", naming.Asked(far=True)).targets))


def test_a_bug_of_wide_rings_is_found_on_them_alone() -> None:
    fault = next(fault for fault in FAULTS if fault.id == "wide-ring-full-at-one-growth-step")
    everything = targets("mistral4", far=True)
    assert [target.storage for target in everything if fault.shown_on(target)] == [FAR[0], FAR[2]]
    judges = [properties.BY_ID[str(fault.breaks)]]
    with fault.plant():
        assert found([WIDE[0]], ONLY_FAR, judges)
        assert not run([DENSE], QUICK, judges)[0].found


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_error_in_front_of_a_crowd_is_a_finding_and_the_search_goes_on(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Once it is muted, programs stop before anybody could gather."""

    def cannot(*_: object) -> int:
        raise RuntimeError("no fork")

    monkeypatch.setattr(CachePool, "fork", cannot)
    profile = dataclasses.replace(QUICK, programs=1, least=1, of_a_kind=0, far=1, patience=0)
    result, _ = run(
        [DENSE], dataclasses.replace(profile, programs=16), [properties.BY_ID["every_operation_completes"]], seed
    )
    assert [bug.finding.property_id for bug in result.found] == ["every_operation_completes"]


@pytest.mark.parametrize(
    "name",
    [
        "rollback-far-drops-one-more",
        "wide-ring-turns-one-slot-late",
        "wide-ring-in-order-loses-a-row",
        "wide-ring-is-trimmed-by-slots",
        "wide-ring-keeps-its-room",
    ],
)
def test_bugs_of_large_steps_are_found(name: str) -> None:
    fault = next(fault for fault in FAULTS if fault.id == name)
    on = [target for target in (DENSE, *WIDE) if fault.shown_on(target)]
    with fault.plant():
        assert found(on, ONLY_FAR, [properties.BY_ID[str(fault.breaks)]])
