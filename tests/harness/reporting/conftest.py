"""Campaign results made by hand, for verdicts that a real run cannot be made to give, and real ones."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from harness.campaign import CampaignResult, FoundBug, PropertyResult, run_campaign
from harness.findings import Finding, Verdict, Violation
from harness.operations import Chunk, Prefill, Program, TrimFront
from harness.profiles import Profile
from harness.reporting import family_record
from harness.tally import Coverage, PropertyTally, Tally
from harness.targets.reference import ReferenceTarget, targets
from properties import ALL


class Unshrunk(Profile):
    """Hypothesis does not shrink: it takes seconds, and ``reduce_finding`` is enough for a report."""

    def settings(self, database: Path | None = None) -> settings:
        return settings(super().settings(database), phases=[Phase.generate])


TINY = Unshrunk("test", programs=15, operations=6)
VERSIONS = {"kv-harness": "0.1.0", "python": "3.11.7", "mlx": "0.32.4", "platform": "Linux x86_64"}
MASK = "mask_key_axis_equals_live_keys"

RECORDED = {"id": "some_bug", "title": "masks | too wide", "upstream": "", "matched": "property, family, mlx-lm 1.0"}

Campaign = Callable[..., CampaignResult]
Record = dict[str, Any]


def bug(
    property_id: str = MASK,
    message: str = "layer 0: the mask has 14 keys, attention received 10",
    reproducible: bool = True,
    after: int = 3,
) -> FoundBug:
    target = targets("qwen2_vl", "offset")[0]
    program = Program((Prefill(10), TrimFront(4), Chunk(4)))
    finding = Finding(property_id, target.identity.name, Violation(2, message), program)
    return FoundBug(finding, target, reproducible, after)


def campaign(
    verdicts: dict[str, Verdict] | None = None,
    found: tuple[FoundBug, ...] = (),
    coverage: dict[str, int] | None = None,
    worst: float | None = None,
    **fields: Any,
) -> CampaignResult:
    """All properties PASS but those in ``verdicts`` or found broken; every counter is 7 but those given."""
    counters = dict.fromkeys(Coverage().to_json(), 7) | {"programs": 1234} | (coverage or {})
    result = CampaignResult("hand", TINY, 5, Tally(coverage=Coverage(**counters)), seconds=1.25, **fields)
    result.tally.targets = {"one-layer, rows": 1000, "plain, int8": 234}
    result.found = list(found)
    chosen = dict(verdicts or {}) | {one.finding.property_id: Verdict.FAIL for one in found}
    for number, prop in enumerate(ALL):
        verdict = chosen.get(prop.id, Verdict.PASS)
        decisive = 0 if verdict in (Verdict.VACUOUS, Verdict.NOT_APPLICABLE) else 1000 + number
        tally = PropertyTally(examples=1200 + number, steps=5000 + number, decisive_steps=decisive, worst=worst)
        reason = None if verdict in (Verdict.PASS, Verdict.FAIL) else f"the reason for {verdict}"
        result.properties.append(PropertyResult(prop.id, verdict, tally, reason))
    return result


def configurations(given: tuple[ReferenceTarget, ...]) -> list[dict[str, Any]]:
    return [{"variant": t.identity.variant, "storage": t.storage, **t.describe()} for t in given]


def record_of(
    result: CampaignResult, control: CampaignResult | None = None, policy: str = "live", **other: Any
) -> Record:
    fields: dict[str, Any] = {
        "family": "qwen2_vl",
        "configurations": configurations(targets("qwen2_vl")),
        "device": "cpu",
        "versions": VERSIONS,
        "command": "kv-harness run qwen2_vl --seed 5",
        "replays": {MASK: "kv-harness replay reports/findings/mask-1.json"},
    }
    return family_record(result, policy=policy, control=control, **(fields | other))


def hand_made() -> dict[str, Record]:
    """One record for every way in which a run can end."""
    caught = campaign(found=(bug(),))
    blind = dict.fromkeys(Coverage().to_json(), 0)
    return {
        "pass": record_of(campaign(), caught),
        "pass with limits": record_of(campaign(), caught, limits=("Only text was put in.",)),
        "fail": record_of(campaign(found=(bug("positions_are_absolute"),)), caught),
        "fail of the same property": record_of(campaign(found=(bug(),)), caught),
        "fail, partial": record_of(campaign(found=(bug(),), partial=True)),
        "offset": record_of(campaign(found=(bug(), bug("every_operation_completes"))), policy="offset"),
        "partial": record_of(campaign(partial=True)),
        "partial control": record_of(campaign(), campaign(partial=True)),
        "no control": record_of(campaign(), control_reason="the target has no counterpart"),
        "control missed": record_of(campaign(), campaign()),
        "control flaky": record_of(campaign(), campaign(found=(bug(reproducible=False),))),
        "flaky": record_of(campaign(found=(bug(reproducible=False),)), caught),
        "vacuous": record_of(campaign({MASK: Verdict.VACUOUS}), caught),
        "nothing ran": record_of(campaign({p.id: Verdict.VACUOUS for p in ALL}, coverage=blind), caught),
        "not applicable": record_of(campaign({MASK: Verdict.NOT_APPLICABLE}), caught),
        "nothing applicable": record_of(campaign({p.id: Verdict.NOT_APPLICABLE for p in ALL}), caught),
        "inconclusive": record_of(campaign({MASK: Verdict.INCONCLUSIVE}), caught),
        "known and limited": record_of(
            campaign({"positions_are_absolute": Verdict.LIMITATION}, found=(bug(),)), caught, known=lambda _: RECORDED
        ),
        "nan": record_of(campaign(worst=float("nan")), caught),
        "inf": record_of(campaign(worst=float("inf")), caught),
        "number": record_of(campaign(worst=8.25e-7), caught),
    }


HAND_MADE = hand_made()


@pytest.fixture(scope="session", params=sorted(HAND_MADE))
def each(request: pytest.FixtureRequest) -> Record:
    """Each of the records made by hand in turn; a test that changes it copies it first."""
    return HAND_MADE[request.param]


@pytest.fixture(scope="session")
def records() -> dict[str, Record]:
    return HAND_MADE


@pytest.fixture(scope="session")
def make() -> dict[str, Any]:
    """The makers above by name (test modules cannot import a conftest)."""
    return {"campaign": campaign, "bug": bug, "record": record_of}


def real_run(policy: str) -> Record:
    live, offset = targets("qwen2_vl")[:1], targets("qwen2_vl", "offset")[:1]
    if policy == "offset":
        result = run_campaign("qwen2_vl", offset, ALL, TINY, 5)
        return record_of(result, policy=policy, configurations=configurations(offset))
    result = run_campaign("qwen2_vl", live, ALL, TINY, 5)
    control = run_campaign("qwen2_vl", offset, ALL, TINY, 5, first_only=True)
    return record_of(result, control, configurations=configurations(live))


@pytest.fixture(scope="session")
def real() -> Callable[[str], Record]:
    """Really runs one reference target: ``real("live")`` with its control, ``real("offset")``."""
    return real_run


@pytest.fixture(scope="session")
def real_live() -> Record:
    return real_run("live")


@pytest.fixture(scope="session")
def real_offset() -> Record:
    return real_run("offset")
