"""Makes the findings of a validation small, on the checkpoint itself, with a number of programs that the plan decides.

No clock has a say in it: two runs of one command write the same report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import properties
from harness.execution import execute
from harness.findings import Finding, FindingError, Violation
from harness.judge import judge_program
from harness.judging import Property
from harness.operations import Program, tokens_of
from harness.reduction import reduce_finding
from harness.target import Target
from harness.validation.journal import Journal
from harness.validation.judged import A_A
from harness.validation.measuring import Keep, Tick, told_of
from harness.validation.plan import Plan, Planned
from harness.validation.smaller import smaller
from harness.wire.process import EngineHung

TOKENS = 8_192
"""How many the programs of a reduction may process together."""
MOST, LEAST = 60, 8
"""Programs that a reduction tries: as many as that allows, within these."""
MOST_HUNG = 2
"""Where an engine in another process does not answer: every program that meets it takes the whole limit."""
SIDE = "after"
NOT_AGAIN = "it did not come back when the program was run again"


def shrink_all(
    plan: Plan,
    journal: Journal,
    target_of: Callable[[Literal["text", "images"]], Target],
    keep: Keep,
    tick_of: Callable[[str], Tick],
    say: Callable[[str], None],
) -> None:
    """Every finding of the judged side in the journal gets its ``shrunk``: what ``told_of`` says of a smaller program,
    or None. Each is in the journal when it is done, so that a run which is killed goes on there."""
    for planned in plan.programs:
        if (result := journal.steps.get((SIDE, planned.name))) is None:
            continue
        for number, found in enumerate(result["findings"]):
            if "shrunk" in found or found["property"] == A_A:
                continue
            name = f"shrinking {SIDE}/{planned.name} {found['property']}"
            tried, shrunk = _shrunk(target_of(planned.path), plan, planned, found, keep, tick_of(name))
            findings = result["findings"]
            findings = [*findings[:number], found | {"shrunk": shrunk}, *findings[number + 1 :]]
            result = result | {"findings": findings}
            journal.add(SIDE, planned.name, result)
            came = "nothing smaller fails" if shrunk is None else shrunk["program_text"]
            say(f"{name}: {tried} programs tried: {came}")


def of_record(found: dict[str, Any]) -> dict[str, Any]:
    """The finding as a report has it: of the shrunk program, and in ``original`` what it came from."""
    rest: dict[str, Any] = {name: value for name, value in found.items() if name != "shrunk"}
    if (shrunk := found.get("shrunk")) is None:
        return rest
    original = {name: found[name] for name in ("message", "program_text", "replay")}
    return {**rest, **shrunk, **({} if shrunk["program_text"] == found["program_text"] else {"original": original})}


def _shrunk(
    target: Target, plan: Plan, planned: Planned, found: dict[str, Any], keep: Keep, tick: Tick
) -> tuple[int, dict[str, Any] | None]:
    """How many programs were tried, and what came of it."""
    tried = 0

    def trying(program: Program) -> None:
        nonlocal tried
        tried += 1
        tick(f"program {tried}, of {len(program.operations)} operations")

    judges = (properties.BY_ID[found["property"]],)
    first = _finding(found)
    start = first
    for program in smaller(plan.asked, planned, first.violation.step):
        trying(program)
        if (fails := _fails(target, program, judges)) is not None:
            start = fails
            break
    best, again = reduce_finding(target, start, judges, _most(start), trying)
    if not again and start is not first:
        best, again = reduce_finding(target, first, judges, 0)
    if not again:
        told = _told(target, dataclasses.replace(first, reproducible=False), keep)
        return tried, told | {"message": f"{told['message']} ({NOT_AGAIN})"}
    return tried, None if best.program == first.program else _told(target, best, keep)


def _finding(found: dict[str, Any]) -> Finding:
    """Also of one that an earlier run left in the journal."""
    trace = found["trace"]
    program, step = Program.from_json(trace["program"]), trace["finding"]["step"]
    where = Finding(found["property"], found["target"], Violation(step, ""), program)
    return dataclasses.replace(where, violation=Violation(step, found["message"].removesuffix(where.message)))


def _fails(target: Target, program: Program, judges: Sequence[Property]) -> Finding | None:
    try:
        judge_program(target, program, judges)
    except FindingError as error:
        return error.finding
    return None


def _most(finding: Finding) -> int:
    """Programs to try: fewer of large ones, and of those for which an engine is waited."""
    if EngineHung.__name__ in finding.violation.message:
        return MOST_HUNG
    tokens = sum(map(tokens_of, finding.program.operations))
    return max(LEAST, min(MOST, TOKENS // max(1, tokens)))


def _told(target: Target, finding: Finding, keep: Keep) -> dict[str, Any]:
    told = told_of(execute(target, finding.program), finding, keep)
    return {name: told[name] for name in ("message", "program_text", "replay", "trace")}
