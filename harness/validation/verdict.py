"""What the measured programs of all sides come to: the acceptance table, and the verdict of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import properties
from harness.findings import Verdict
from harness.judging import Property
from harness.reporting.text import count
from harness.target import Capability
from harness.validation.judged import A_A, COMPLETES, CONTROL, NO_FIT
from harness.validation.measuring import DECIDED
from harness.validation.plan import Plan
from harness.validation.sides import LIBRARY, control_side

Results = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""Side -> name of the program -> what ``measuring.measure`` gave."""
REACHES = "the prompt gets to a chunk behind a trim"
"""The first criterion, which the plan alone decides."""
READER = "reader"
"""The side of whoever else can read the weights, where which weights an engine serves is its own word."""
_WORST = (Verdict.FAIL, Verdict.INCONCLUSIVE, Verdict.VACUOUS)
_SEEN = frozenset({Capability.ATTENTION, Capability.POSITIONS})


@dataclass(frozen=True)
class Row:
    """A line of the acceptance table. ``decisive``: steps that could have told right from wrong."""

    criterion: str
    result: Verdict
    evidence: str
    decisive: int

    def to_json(self) -> dict[str, Any]:
        return {
            "criterion": self.criterion,
            "result": self.result.value,
            "evidence": self.evidence,
            "decisive_steps": self.decisive,
        }


def acceptance(
    plan: Plan, sides: Mapping[str, str], claimed: Sequence[Property], results: Results, two_engines: bool = False
) -> tuple[tuple[Row, ...], Verdict, str]:
    """(rows, verdict, reason). ``sides``: name (``after`` is the one that is judged) -> mask policy; ``two_engines``:
    ``before`` ran on another than the others."""
    side = control_side(sides, two_engines)
    rows = [_reaches(plan), _control(plan, None if side is None else results[side]), _felt(plan, results["after"])]
    rows += [_property(prop, results["after"]) for prop in claimed]
    if "before" in sides:
        repeats = _property(properties.BY_ID[A_A], results["before"])
        rows.append(replace(repeats, criterion=f"the before side repeats itself: {A_A}"))
        # Other caches hand their rows to attention in another order, and another engine adds in one of its own: of
        # those the bytes may differ.
        rows += [] if two_engines or sides["before"] == LIBRARY else [_same_bytes(results)]
        rows.append(_same_greedy(results))
    if READER in results:
        rows += [shows(claimed), _weights(results)]
    met = {row.result for row in rows}
    verdict = next((worst for worst in _WORST if worst in met), Verdict.PASS)
    left = [planned.name for planned in plan.programs if planned.decisive and planned.name not in results["after"]]
    without = f"; not run: {', '.join(left)}" if left else ""
    return tuple(rows), verdict, _reason(verdict, rows) + without


def _reason(verdict: Verdict, rows: Sequence[Row]) -> str:
    if verdict is Verdict.PASS:
        decisive = sum(row.decisive for row in rows)
        return f"{len(rows)} criteria hold, {decisive:,} decisive steps; the planted bug was caught on the same plan"
    names = ", ".join(row.criterion for row in rows if row.result is verdict)
    words = {
        Verdict.FAIL: "not met",
        Verdict.INCONCLUSIVE: "could not be compared",
        Verdict.VACUOUS: "never put to the test",
    }
    return f"{words[verdict]}: {names}"


def _reaches(plan: Plan) -> Row:
    first = plan.first_decisive
    widths = f"a mask by the offset has {first.offset + first.tokens} keys, attention {first.live_len + first.tokens}"
    decisive = sum(chunk.decisive for chunk in plan.chunks)
    return Row(REACHES, Verdict.PASS, f"{first}: {widths}", decisive)


def _control(plan: Plan, results: Mapping[str, Mapping[str, Any]] | None) -> Row:
    criterion = "the offset mask policy is caught on the same plan"
    if results is None:
        evidence = "the engine has no other mask policy, so that no bug could be planted: nothing shows what is found"
        return Row(criterion, Verdict.VACUOUS, evidence, 0)
    names = [planned.name for planned in plan.programs if planned.decisive]
    caught = {name: _of_masks(results[name]["findings"]) for name in names}
    if missed := [name for name in names if not caught[name]]:
        evidence = f"not caught in {', '.join(missed)}: that nothing else was found there proves nothing"
        return Row(criterion, Verdict.VACUOUS, evidence, len(names) - len(missed))
    evidence = "; ".join(f"{name}: {found[0]['message']}" for name, found in caught.items())
    return Row(criterion, Verdict.PASS, evidence, len(names))


def _of_masks(findings: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Findings of the width of a mask; where a model adds masks up by hand, the wrong one never gets to an attention
    call, and MLX says that it does not fit."""
    return [found for found in findings if found["property"] == CONTROL] or [
        found for found in findings if found["property"] == COMPLETES and NO_FIT in found["message"]
    ]


def _felt(plan: Plan, results: Mapping[str, Mapping[str, Any]]) -> Row:
    """Weights of zeros, or an attention that reaches no logit, would pass every comparison of outputs."""
    criterion = "logits depend on the keys: behind a trim they are not those of the untrimmed prompt"
    first = plan.first_decisive.number - 1
    pairs = list(zip(results["untrimmed"]["digests"], results["bounded"]["digests"], strict=False))
    behind = pairs[first : len(plan.chunks)]
    differ = sum(untrimmed != bounded for untrimmed, bounded in behind)
    evidence = f"{differ} of {count(len(behind), 'forward')} behind a trim differ"
    return Row(criterion, Verdict.PASS if differ else Verdict.VACUOUS, evidence, differ)


def _property(prop: Property, results: Mapping[str, Mapping[str, Any]]) -> Row:
    counted = {name: r["properties"][prop.id] for name, r in results.items() if prop.id in r["properties"]}
    steps, decisive = (sum(each[what] for each in counted.values()) for what in ("steps", "decisive"))
    found = [f for result in results.values() for f in result["findings"] if f["property"] == prop.id]
    doubt = next((each["doubt"] for each in counted.values() if each["doubt"]), None)
    blind = sum(result["blind"] for result in results.values())
    if found and prop.id == A_A:
        return Row(prop.id, Verdict.INCONCLUSIVE, found[0]["message"], decisive)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        return Row(prop.id, Verdict.FAIL, found[0]["message"] + more, decisive)
    if doubt:
        return Row(prop.id, Verdict.INCONCLUSIVE, doubt, decisive)
    if not decisive:
        return Row(prop.id, Verdict.VACUOUS, f"no decisive step in {steps}; decisive: {prop.decisive_when}", 0)
    if blind and prop.needs & _SEEN:
        forwards = sum(result["forwards"] for result in results.values())
        evidence = f"{blind} of {forwards} forwards hid attention or position calls"
        return Row(prop.id, Verdict.INCONCLUSIVE, evidence, decisive)
    worst = max((float(each["worst"]) for each in counted.values() if each["worst"] is not None), default=None)
    told = "" if worst is None else f"; largest difference {worst:.3g}"
    return Row(prop.id, Verdict.PASS, f"{steps:,} steps in {count(len(counted), 'program')}{told}", decisive)


def _same_bytes(results: Results) -> Row:
    """The untrimmed program, forward by forward."""
    criterion = "untrimmed logits are those of the before side, byte for byte"
    before, after = (results[side]["untrimmed"]["digests"] for side in ("before", "after"))
    if doubt := _doubt(results, "before"):
        return Row(criterion, Verdict.INCONCLUSIVE, doubt, 0)
    if before == after:
        return Row(criterion, Verdict.PASS, f"{len(after)} forwards", len(after))
    differ = sum(a != b for a, b in zip(before, after, strict=False)) + abs(len(before) - len(after))
    return Row(criterion, Verdict.FAIL, f"{differ} of {len(after)} forwards differ", len(after))


def shows(claimed: Sequence[Property]) -> Row:
    """An engine that neither shows what attention is given nor has its logits compared could do anything."""
    criterion = "the engine shows masks and positions, or its logits are compared"
    compared = [prop.id for prop in claimed if prop.needs & {Capability.WITNESS, Capability.CACHE_FREE}]
    shown = [prop.id for prop in claimed if prop.needs & _SEEN]
    if compared or all(any(one in prop.needs for prop in claimed) for one in _SEEN):
        return Row(criterion, Verdict.PASS, ", ".join(shown + compared), len(shown + compared))
    return Row(criterion, Verdict.VACUOUS, "it does not show both, and has no forward without a cache", 0)


def _weights(results: Results) -> Row:
    criterion = "the weights are those of the checkpoint: greedy tokens of the untrimmed prompt, read by another engine"
    if not results[READER]:
        evidence = "nobody else here can read this checkpoint: which weights are served is the engine's own word"
        return Row(criterion, Verdict.VACUOUS, evidence, 0)
    return _same_greedy(results, READER, criterion)


def _same_greedy(
    results: Results,
    side: str = "before",
    criterion: str = "greedy tokens are those of the before side, where both are decided",
) -> Row:
    """Forward by forward as far as both sides got, at tokens that both decide."""
    decided = total = 0
    different = []
    for name, after in results["after"].items():
        before = results[side].get(name, {"greedy": []})  # caches without a front trim run the untrimmed one alone
        for mine, theirs in zip(after["greedy"], before["greedy"], strict=False):
            both = [(a, b) for a, b in zip(mine, theirs, strict=False) if a >= 0 and b >= 0]
            total += len(mine)
            decided += len(both)
            different += [name for a, b in both if a != b]
    told = f"{decided:,} of {total:,} tokens are decided (the two largest logits {DECIDED:g} deviations apart)"
    if doubt := _doubt(results, side):
        return Row(criterion, Verdict.INCONCLUSIVE, doubt, decided)
    if different:
        return Row(criterion, Verdict.FAIL, f"{len(different)} differ, the first in {different[0]}; {told}", decided)
    return Row(criterion, Verdict.PASS if decided else Verdict.VACUOUS, told, decided)


def _doubt(results: Results, side: str) -> str | None:
    """Which of the two sides of a comparison does not repeat itself, if one does not: what differs may be noise."""
    for one in ("after", side):
        for name, result in results[one].items():
            if any(found["property"] == A_A for found in result["findings"]):
                return f"the {one} side does not repeat itself, in {name}"
    return None
