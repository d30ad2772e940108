"""A whole validation: every side, program by program, and the record of what they came to."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from typing import Any

import properties
from harness.capability import Capability
from harness.capability import needs as needs_of
from harness.checkpoints.memory import Footprint
from harness.execution import Execution
from harness.findings import Finding
from harness.recording import record as record_trace
from harness.reporting import versions, write_atomically
from harness.target import Target
from harness.terminal import INTERRUPTS
from harness.validation.engines import Engine, EngineError, reader_of
from harness.validation.journal import Journal, key_of
from harness.validation.judged import A_A, claimed, watched
from harness.validation.limits import limits
from harness.validation.measuring import measure
from harness.validation.plan import BOUNDED, UNTRIMMED, Plan
from harness.validation.record import Validation, record_of
from harness.validation.verdict import PLANTED, READER

PASSES = 3  # of a program: itself, again, and its untrimmed part under the other policy
PASSES_COMPARED = 7  # and without rejected drafts, in one forward, without a cache, in float64 (which counts twice)
SILENCE = 10.0  # seconds after which a program says how far it is


def with_control(before: str | None, after: str, policies: Sequence[str] = ("live", PLANTED)) -> dict[str, str]:
    """The sides and their mask policies: beside those asked for, the planted bug, where none of them has it and the
    engine can. EngineError for a policy that it lacks."""
    sides = {"after": after} | ({} if before is None else {"before": before})
    for side, policy in sides.items():
        if policy not in policies:
            raise EngineError(f"argument --{side}: this engine has {', '.join(policies)}, not {policy}")
    return sides if PLANTED in sides.values() or PLANTED not in policies else sides | {"control": PLANTED}


def estimate(needs: Footprint, plan: Plan, vocab_size: int, compared: bool) -> int:
    """Bytes at most: the weights (and those of the float64 witness), and of the largest program its caches, the rows
    told of them and the float32 logits of every pass."""
    passes = PASSES_COMPARED if compared else PASSES
    programs = (
        (planned.rows_told + passes * planned.tokens) * needs.token + passes * planned.tokens * vocab_size * 4
        for planned in plan.programs
    )
    return needs.weights * (3 if compared else 1) + max(programs)


def run(wanted: Validation, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure what has not been measured, write the report, and return its record; ``say`` is told of the progress.

    CheckpointError or TargetError where the weights cannot be loaded, EngineError where the engine cannot run the plan,
    OSError where nothing can be written.
    """
    started = time.monotonic()
    wanted.begin()
    engine = wanted.engine
    say(f"loading {engine.title} ({wanted.estimate / 1e9:.3g} GB estimated)")
    target = engine.target(wanted.sides["after"])
    plan, lacking = _runnable(wanted.plan, target, engine)
    wanted = dataclasses.replace(wanted, plan=plan)
    judges, left_out = claimed(target, plan, engine.compared)
    journal = Journal(wanted.file("partial.jsonl"), key_of(_decides(wanted)))
    sides, names = {*wanted.sides, READER}, {planned.name for planned in plan.programs}
    journal.steps = {(s, p): result for (s, p), result in journal.steps.items() if s in sides and p in names}
    if journal.steps and engine.own_word and not _answers_as_before(wanted, journal, say):
        say("the engine does not answer as it did: everything is measured again")
        journal.steps = {}
    if journal.steps:
        told = ", ".join("/".join(names) for names in journal.steps)
        say(f"goes on behind {len(journal.steps)} finished steps ({told})")
    for side, policy in wanted.sides.items():
        able = engine.target(policy).capabilities
        for planned in plan.programs:
            if (side, planned.name) in journal.steps or (side == "control" and not planned.decisive):
                continue
            if not needs_of(planned.program) <= able | {Capability.IMAGES}:  # whether it sees, its plan knows
                continue
            since = time.monotonic()
            chosen = judges if side == "after" else watched(engine.target(policy), compared=side == "before")
            keep = _keep(wanted) if side == "after" else _forget
            tick = _tick(f"{side}/{planned.name}", say)
            result = measure(engine.target(policy, planned.path), planned, chosen, keep, tick)
            journal.add(side, planned.name, result)
            found = len(result["findings"])
            say(
                f"{side}/{planned.name}: {result['forwards']} forwards, {found or 'no'} "
                f"finding{'' if found == 1 else 's'}, {time.monotonic() - since:.1f} s"
            )
    if engine.own_word and (READER, UNTRIMMED) not in journal.steps and (reader := reader_of(engine)) is not None:
        other, policy = reader
        planned = next(planned for planned in plan.programs if planned.name == UNTRIMMED)
        say(f"reading the weights with {other.phrase}")
        twice = (properties.BY_ID[A_A],)
        journal.add(READER, UNTRIMMED, measure(other.target(policy), planned, twice, _forget, _tick(READER, say)))
    results: dict[str, dict[str, Any]] = {side: {} for side in (*wanted.sides, *([READER] if engine.own_word else []))}
    for (side, program), result in journal.steps.items():
        results[side][program] = result
    data = record_of(
        wanted, judges, (*lacking, *limits(engine, plan, left_out, results)), results, time.monotonic() - started
    )
    wanted.write(data)
    journal.remove()
    return data


def _answers_as_before(wanted: Validation, journal: Journal, say: Callable[[str], None]) -> bool:
    """Another process may serve other weights than it did: the first of the finished programs is run once more."""
    (side, name), result = next(iter(journal.steps.items()))
    if side not in wanted.sides:
        return False
    planned = next(planned for planned in wanted.plan.programs if planned.name == name)
    target = wanted.engine.target(wanted.sides[side], planned.path)
    again = measure(target, planned, (), _forget, _tick(f"{side}/{name} again", say))
    return bool(again["digests"] == result["digests"])


def _runnable(plan: Plan, target: Target, engine: Engine) -> tuple[Plan, tuple[str, ...]]:
    """The programs that the target can run, and sentences on the others. EngineError without the bounded one."""
    can, lacking = [], []
    for planned in plan.programs:
        lacks = sorted(needs_of(planned.program) - target.capabilities - {Capability.IMAGES})
        if not lacks:
            can.append(planned)
        elif planned.name == BOUNDED:
            raise EngineError(
                f"argument --engine: {engine.name} cannot be validated, no chunk would follow a trim: it lacks "
                f"{', '.join(lacks)}"
            )
        else:
            lacking.append(f"The program {planned.name} was not run: the engine lacks {', '.join(lacks)}.")
    return dataclasses.replace(plan, programs=tuple(can)), tuple(lacking)


def _decides(wanted: Validation) -> dict[str, Any]:
    return {
        "versions": versions(),
        "fingerprint": wanted.engine.digests.digest,
        "engine": wanted.engine.phrase,
        "command": wanted.command,
        "sides": dict(wanted.sides),
        "device": wanted.engine.device,
        "programs": [[planned.name, planned.program.to_json()] for planned in wanted.plan.programs],
    }


def _keep(wanted: Validation) -> Callable[[Execution, Finding], str]:
    def keep(run: Execution, finding: Finding) -> str:
        trace = record_trace(run, finding, versions())
        path = wanted.out / "findings" / trace.file_name
        write_atomically(path, trace.to_text())
        return f"kv-harness replay {shlex.quote(str(path))}{wanted.engine.replay_options}"

    return keep


def _tick(name: str, say: Callable[[str], None]) -> Callable[[str], None]:
    """Says how far a program is, but not all the time; KeyboardInterrupt where one was asked for and got lost."""
    said = time.monotonic()

    def tick(words: str) -> None:
        nonlocal said
        INTERRUPTS.check()
        if time.monotonic() - said >= SILENCE:
            said = time.monotonic()
            say(f"{name}: {words}")

    return tick


def _forget(run: Execution, finding: Finding) -> str:
    return ""
