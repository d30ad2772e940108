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
from harness.checkpoints import CheckpointError
from harness.execution import Execution
from harness.findings import Finding
from harness.judging import Property
from harness.recording import record as record_trace
from harness.reporting import versions, write_atomically
from harness.target import Target
from harness.targets.naming import TargetError
from harness.terminal import INTERRUPTS
from harness.validation.engine import Engine
from harness.validation.engines import reader_of
from harness.validation.journal import Journal, key_of
from harness.validation.judged import A_A, claimed, watched
from harness.validation.limits import limits
from harness.validation.measuring import measure
from harness.validation.plan import BOUNDED, UNTRIMMED, Plan, Planned
from harness.validation.record import Validation, record_of
from harness.validation.shrinking import shrink_all
from harness.validation.sides import EngineError
from harness.validation.verdict import READER

PASSES = 3  # of a program: itself, again, and its untrimmed part under the other policy
PASSES_COMPARED = 7  # and without rejected drafts, in one forward, without a cache, in float64 (which counts twice)
SILENCE = 10.0  # seconds after which a program says how far it is


def estimate(engine: Engine, plan: Plan, other: Engine | None = None) -> int:
    """Bytes at most: the weights (and those of the float64 witness), and of the largest program its caches, the rows
    told of them and the float32 logits of every pass. Of two engines the one that needs more: each is loaded when the
    other has let go of its weights, and nothing of ``other`` (of the before side) is compared with a witness."""
    mine = _estimate(engine, plan, engine.compared)
    return mine if other is None else max(mine, _estimate(other, plan, compared=False))


def _estimate(engine: Engine, plan: Plan, compared: bool) -> int:
    needs, passes = engine.needs, PASSES_COMPARED if compared else PASSES
    programs = (
        (planned.rows_told + passes * planned.tokens) * needs.token + passes * planned.tokens * engine.vocab_size * 4
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
    told = engine.limits()
    journal = Journal(wanted.file("partial.jsonl"), key_of(_decides(wanted)))
    sides, names = {*wanted.sides, READER}, {planned.name for planned in plan.programs}
    journal.steps = {(s, p): result for (s, p), result in journal.steps.items() if s in sides and p in names}
    if journal.steps and not _answers_as_before(wanted, journal, say):
        say("the engine does not answer as it did: everything is measured again")
        journal.steps = {}
    if journal.steps:
        finished = ", ".join("/".join(names) for names in journal.steps)
        say(f"goes on behind {len(journal.steps)} finished steps ({finished})")
    # The engine that may not load, or not be there, comes first: before hours were spent on the other one.
    for side in sorted(wanted.sides, key=lambda side: wanted.engine_of(side) is engine):
        left = [planned for planned in plan.programs if (side, planned.name) not in journal.steps]
        if side == "control":
            left = [planned for planned in left if planned.decisive]
        if left:
            _measure_side(wanted, side, left, judges, journal, say)
    _alone(wanted, "after")  # which what follows is of
    if engine.own_word and (READER, UNTRIMMED) not in journal.steps and (reader := reader_of(engine)) is not None:
        other, policy = reader
        planned = next(planned for planned in plan.programs if planned.name == UNTRIMMED)
        say(f"reading the weights with {other.phrase}")
        twice = (properties.BY_ID[A_A],)
        journal.add(READER, UNTRIMMED, measure(other.target(policy), planned, twice, _forget, _tick(READER, say)))
    shrink_all(
        plan,
        journal,
        lambda path: engine.target(wanted.sides["after"], path),
        _keep(wanted),
        lambda name: _tick(name, say),
        say,
    )
    results: dict[str, dict[str, Any]] = {side: {} for side in (*wanted.sides, *([READER] if engine.own_word else []))}
    for (side, program), result in journal.steps.items():
        results[side][program] = result
    compared = None if wanted.other is None else (wanted.other, wanted.sides["before"])
    not_shown = (*lacking, *limits(engine, told, plan, left_out, results, compared))
    data = record_of(wanted, judges, not_shown, results, time.monotonic() - started)
    wanted.write(data)
    journal.remove()
    return data


def _measure_side(
    wanted: Validation,
    side: str,
    left: Sequence[Planned],
    judges: Sequence[Property],
    journal: Journal,
    say: Callable[[str], None],
) -> None:
    """The programs that are left, as far as the side's engine can run them. Where there are two engines, the other one
    lets go of its weights first. Raises as ``run``."""
    engine, policy = _alone(wanted, side), wanted.sides[side]
    able = _load(wanted, side, journal).capabilities
    for planned in left:
        if not needs_of(planned.program) <= able | {Capability.IMAGES}:  # whether it sees, its plan knows
            continue
        if planned.path == "images" and engine.no_images is not None:  # but of the judged engine alone
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


def _alone(wanted: Validation, side: str) -> Engine:
    """The engine of this side, when the other one, if there is one, has let go of its weights."""
    engine = wanted.engine_of(side)
    for each in (wanted.engine, wanted.other):
        if each is not None and each is not engine:
            each.release()
    return engine


def _load(wanted: Validation, side: str, journal: Journal) -> Target:
    """Its target. What cannot be loaded beside the judged engine names the option that asked for it."""
    engine = wanted.engine_of(side)
    try:
        return engine.target(wanted.sides[side])
    except (CheckpointError, TargetError) as error:
        if not journal.steps:
            journal.remove()  # nothing was measured: there is nothing to go on behind
        if engine is wanted.engine:
            raise
        raise EngineError(f"argument --before: {engine.name:.80} cannot be used: {error}") from error


def _answers_as_before(wanted: Validation, journal: Journal, say: Callable[[str], None]) -> bool:
    """Another process may serve other weights than it did: of every engine that is one, the first of the finished
    programs is run once more."""
    asked: set[str] = set()
    for (side, name), result in journal.steps.items():
        engine = wanted.engine_of(side)
        if side == READER or not engine.own_word or engine.name in asked:
            continue
        asked.add(engine.name)
        planned = next(planned for planned in wanted.plan.programs if planned.name == name)
        target = _alone(wanted, side).target(wanted.sides[side], planned.path)
        again = measure(target, planned, (), _forget, _tick(f"{side}/{name} again", say))
        if again["digests"] != result["digests"]:
            return False
    return True


def _runnable(plan: Plan, target: Target, engine: Engine) -> tuple[Plan, tuple[str, ...]]:
    """The programs that the target can run, and sentences on the others. EngineError without the bounded one."""
    can, lacking = [], []
    for planned in plan.programs:
        lacks = sorted(needs_of(planned.program) - target.capabilities - {Capability.IMAGES})
        if not lacks:
            can.append(planned)
        elif planned.name == BOUNDED:
            raise EngineError(
                f"argument {engine.option}: {engine.name} cannot be validated, no chunk would follow a trim: it lacks "
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
        "before": None if wanted.other is None else [wanted.other.phrase, wanted.other.device],
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
