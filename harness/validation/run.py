"""A whole validation: every side, program by program, and the record of what they came to."""

from __future__ import annotations

import dataclasses
import re
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import properties
from harness.checkpoints import Checkpoint, Fingerprint, as_dict
from harness.checkpoints.memory import Footprint
from harness.execution import Execution
from harness.findings import Finding
from harness.judging import Property
from harness.operations import EnforceMaxKvSize
from harness.recording import record as record_trace
from harness.reporting import check_writable, record_text, versions, write_atomically, write_pages
from harness.reporting.checkpoint import SCHEMA, SCHEMA_VERSION, checkpoint_markdown
from harness.targets import checkpoint as loaded
from harness.terminal import INTERRUPTS
from harness.validation.journal import Journal, key_of
from harness.validation.judged import CONTROL, claimed
from harness.validation.limits import limits
from harness.validation.measuring import measure
from harness.validation.plan import Plan
from harness.validation.verdict import A_A, PLANTED, acceptance

WATCHED = (CONTROL, "mask_shows_exactly_the_visible_set", "every_operation_completes")
"""What sides are asked that are not judged: where their masks break."""
SILENCE = 10.0  # seconds after which a program says how far it is
KINDS = ("json", "md", "html")
"""Of the files of a report."""
_UNTOLD = (("after", "live"), ("control", "offset"))
"""Sides that are not in its name: every validation has them unless it says otherwise."""
PASSES = 3  # of a program: itself, again, and its untrimmed part under the other policy
PASSES_COMPARED = 7  # and without rejected drafts, in one forward, without a cache, in float64 (which counts twice)


@dataclass(frozen=True)
class Validation:
    """What is validated, and how: ``where`` the checkpoint was found, its fingerprint, the plan, the sides (``after``,
    and ``before`` if it is asked for) with their mask policies; ``command`` repeats it."""

    checkpoint: Checkpoint
    where: str
    digests: Fingerprint
    plan: Plan
    sides: Mapping[str, str]
    dtype: str | None
    out: Path
    command: str
    estimate: int

    @property
    def stem(self) -> Path:
        """Of its files, without a suffix: another for every checkpoint and everything that decides the result, so that
        no validation takes the report of another one's place."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.checkpoint.name)[-80:].strip("-.") or "checkpoint"
        asked = self.plan.asked
        parts = [name, self.digests.digest[:8], f"P{asked.max_kv_size}", f"C{asked.prefill_chunk_size}"]
        parts += [f"N{asked.tokens}", f"K{asked.decode}"]
        parts += [f"{side}-{policy}" for side, policy in self.sides.items() if (side, policy) not in _UNTOLD]
        parts += [self.dtype] if self.dtype else []
        parts += [f"seed{asked.seed}"] if asked.seed else []
        parts += [kind] if (kind := loaded.device_kind()) != "cpu" else []
        return self.out / "checkpoints" / "-".join(parts)

    def file(self, suffix: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{suffix}")


def with_control(before: str | None, after: str) -> dict[str, str]:
    """The sides and their mask policies: beside those asked for, the planted bug, where none of them has it."""
    sides = {"after": after} | ({} if before is None else {"before": before})
    return sides if PLANTED in sides.values() else sides | {"control": PLANTED}


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

    CheckpointError where the weights cannot be loaded, OSError where nothing can be written.
    """
    started = time.monotonic()
    check_writable(wanted.out, [wanted.stem.relative_to(wanted.out)], (*KINDS, "partial.jsonl"))
    for (
        kind
    ) in KINDS:  # an older report, of other numbers maybe, must not be taken for this one's if this one is killed
        wanted.file(kind).unlink(missing_ok=True)
    journal = Journal(wanted.file("partial.jsonl"), key_of(_decides(wanted)))
    sides, names = set(wanted.sides), {planned.name for planned in wanted.plan.programs}
    journal.steps = {(s, p): result for (s, p), result in journal.steps.items() if s in sides and p in names}
    if journal.steps:
        told = ", ".join("/".join(names) for names in journal.steps)
        say(f"goes on behind {len(journal.steps)} finished steps ({told})")
    say(f"loading {wanted.checkpoint.name} ({wanted.estimate / 1e9:.3g} GB estimated)")
    target = _target(wanted, "after", "text")
    target.load()
    judges, left_out = claimed(target, wanted.plan, loaded.compares(wanted.checkpoint, wanted.dtype))
    for side in wanted.sides:
        for planned in wanted.plan.programs:
            if (side, planned.name) in journal.steps or (side == "control" and not planned.decisive):
                continue
            since = time.monotonic()
            chosen = judges if side == "after" else tuple(properties.BY_ID[name] for name in WATCHED)
            keep = _keep(wanted) if side == "after" else _forget
            tick = _tick(f"{side}/{planned.name}", say)
            result = measure(_target(wanted, side, planned.path), planned, chosen, keep, tick)
            journal.add(side, planned.name, result)
            found = len(result["findings"])
            say(
                f"{side}/{planned.name}: {result['forwards']} forwards, {found or 'no'} "
                f"finding{'' if found == 1 else 's'}, {time.monotonic() - since:.1f} s"
            )
    results: dict[str, dict[str, Any]] = {side: {} for side in wanted.sides}
    for (side, program), result in journal.steps.items():
        results[side][program] = result
    data = _record(wanted, judges, left_out, results, time.monotonic() - started)
    write_atomically(wanted.file("json"), record_text(data))
    write_pages(wanted.file("json"), checkpoint_markdown(data), data["findings"], wanted.out)
    journal.remove()
    return data


def _target(wanted: Validation, side: str, path: str) -> loaded.CheckpointTarget:
    digest = wanted.digests.digest
    return loaded.target_of(wanted.checkpoint, wanted.where, digest, wanted.sides[side], path, wanted.dtype)


def _decides(wanted: Validation) -> dict[str, Any]:
    return {
        "versions": versions(),
        "fingerprint": wanted.digests.digest,
        "command": wanted.command,
        "sides": dict(wanted.sides),
        "device": loaded.device(),
        "programs": [[planned.name, planned.program.to_json()] for planned in wanted.plan.programs],
    }


def _keep(wanted: Validation) -> Callable[[Execution, Finding], str]:
    def keep(run: Execution, finding: Finding) -> str:
        trace = record_trace(run, finding, versions())
        path = wanted.out / "findings" / trace.file_name
        write_atomically(path, trace.to_text())
        return f"kv-harness replay {shlex.quote(str(path))}"

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


def _record(
    wanted: Validation,
    judges: tuple[Property, ...],
    left_out: Mapping[str, str],
    results: Mapping[str, Mapping[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    plan, checkpoint = wanted.plan, as_dict(wanted.checkpoint, wanted.digests)
    rows, verdict, reason = acceptance(plan, wanted.sides, judges, results)
    bounded = next(planned for planned in plan.programs if planned.name == "bounded")
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict.value,
        "verdict_reason": reason,
        "checkpoint": {
            **{k: checkpoint[k] for k in ("name", "family", "variant", "quantisation", "parameters", "bytes", "notes")},
            "fingerprint": wanted.digests.digest,
            "files": dict(wanted.digests.files),
        },
        "dtype": loaded.computes_in(wanted.checkpoint, wanted.dtype),
        "sides": dict(wanted.sides),
        "device": loaded.device(),
        "versions": versions(),
        "seed": plan.asked.seed,
        "memory_estimate": wanted.estimate,
        "plan": {
            **{k: v for k, v in dataclasses.asdict(plan.asked).items() if k != "seed"},
            "chunks": [{**dataclasses.asdict(chunk), "decisive": chunk.decisive} for chunk in plan.chunks],
            "first_decisive": dataclasses.asdict(plan.first_decisive),
            "trims": sum(
                before.live_len > after.live_len and isinstance(operation, EnforceMaxKvSize)
                for operation, before, after in zip(
                    bounded.program.operations, bounded.states, bounded.states[1:], strict=False
                )
            ),
            "programs": [
                {
                    "name": planned.name,
                    "phrase": planned.phrase,
                    "path": planned.path,
                    "program": planned.program.to_json(),
                    "program_text": str(planned.program),
                }
                for planned in plan.programs
            ],
        },
        "acceptance": [row.to_json() for row in rows],
        "crashes": [
            {"side": side, "program": name, **result["crash"]}
            for side, programs in results.items()
            for name, result in programs.items()
            if result["crash"] is not None
        ],
        "findings": [
            {"program": name, **found}
            for name, result in results["after"].items()
            for found in result["findings"]
            if found["property"] != A_A
        ],
        "limits": limits(wanted.checkpoint, wanted.dtype, plan, left_out),
        "command": wanted.command,
        "written": {"at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(seconds, 1)},
    }
