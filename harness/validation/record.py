"""What is validated, the files of its report, and the record that they are made from."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.findings import Verdict
from harness.judging import Property
from harness.operations import EnforceMaxKvSize
from harness.reporting import check_writable, record_text, versions, write_atomically, write_pages
from harness.reporting.checkpoint import SCHEMA, SCHEMA_VERSION, checkpoint_markdown
from harness.targets.checkpoint import device_kind
from harness.validation.engine import Engine
from harness.validation.judged import A_A
from harness.validation.plan import BOUNDED, Asked, Nothing, Plan, Planned
from harness.validation.shrinking import of_record
from harness.validation.verdict import REACHES, Results, Row, acceptance

KINDS = ("json", "md", "html")
"""Of the files of a report."""
_UNTOLD = (("after", "live"), ("control", "offset"))
"""Sides that are not in its name: every validation has them unless it says otherwise."""
_SIGNS = (
    *(("P", "max_kv_size"), ("C", "prefill_chunk_size"), ("N", "tokens"), ("K", "decode")),
    ("seed", "seed"),
)


@dataclass(frozen=True)
class Validation:
    """What is validated, and how: the ``engine`` with the checkpoint, the plan, the sides (``after``, and ``before`` if
    it is asked for) with their mask policies; ``command`` repeats it; ``other``: the engine of ``before``, where that
    is another one."""

    engine: Engine
    plan: Plan
    sides: Mapping[str, str]
    out: Path
    command: str
    estimate: int
    other: Engine | None = None

    def engine_of(self, side: str) -> Engine:
        """Which runs this side."""
        return self.other if side == "before" and self.other is not None else self.engine

    @property
    def stem(self) -> Path:
        """Of its files, without a suffix: name and fingerprint, and everything that decides the result and is not as
        usual, so that no validation takes the report of another one's place."""
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", self.engine.title)[-80:].strip("-.") or "checkpoint"
        asked, usual, engine = self.plan.asked, Asked(), self.engine
        parts = [name, engine.digests.digest[:8], *([engine.label] if engine.label else [])]
        numbers = ((sign, getattr(asked, field), getattr(usual, field)) for sign, field in _SIGNS)
        parts += [f"{sign}{number}" for sign, number, default in numbers if number != default]
        sides = [(side, policy) for side, policy in self.sides.items() if (side, policy) not in _UNTOLD]
        parts += [f"{side}{self._of_another(side)}-{policy}" for side, policy in sides]
        parts += [engine.dtype] if engine.dtype else []
        parts += [kind] if (kind := device_kind()) != "cpu" else []
        return self.out / "checkpoints" / "-".join(parts)

    def _of_another(self, side: str) -> str:
        """The engine of ``before`` in the name, where it is another one, and its type where that was asked of it."""
        if side != "before" or self.other is None:
            return ""
        asked = self.other.dtype if self.other.dtype != self.engine.dtype else None
        return "".join(f"-{part}" for part in (self.other.label or self.other.name, asked) if part)

    def file(self, suffix: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{suffix}")

    def begin(self) -> None:
        """Remove an older report: it must not be taken for this one's, if this one is killed. OSError where none can be
        written."""
        check_writable(self.out, [self.stem.relative_to(self.out)], (*KINDS, "partial.jsonl"))
        for kind in KINDS:
            self.file(kind).unlink(missing_ok=True)

    def write(self, data: dict[str, Any]) -> None:
        """The report of this record. OSError."""
        write_atomically(self.file("json"), record_text(data))
        write_pages(self.file("json"), checkpoint_markdown(data), data, self.out)


def record_of(
    wanted: Validation,
    judges: tuple[Property, ...],
    limits: tuple[str, ...],
    results: Results,
    seconds: float,
) -> dict[str, Any]:
    """``limits``: what could not be shown; ``results``: of every side."""
    rows, verdict, reason = acceptance(wanted.plan, wanted.sides, judges, results, wanted.other is not None)
    return {
        **_of_the_plan(wanted, verdict, reason, seconds),
        "acceptance": [row.to_json() for row in rows],
        "crashes": [
            {"side": side, "program": name, **result["crash"]}
            for side, programs in results.items()
            for name, result in programs.items()
            if result["crash"] is not None
        ],
        "masks": [told for side in wanted.sides if (told := _first_mask(side, results[side])) is not None],
        "findings": [
            {"program": name, **of_record(found)}
            for name, result in results["after"].items()
            for found in result["findings"]
            if found["property"] != A_A
        ],
        "limits": list(limits),
    }


def _first_mask(side: str, programs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | None:
    """One picture is enough: other programs get theirs wrong in the same way."""
    wrong = ((name, result["mask"]) for name, result in programs.items() if result["mask"] is not None)
    return next(({"side": side, "program": name, **mask} for name, mask in wrong), None)


def record_of_nothing(wanted: Validation, nothing: Nothing, seconds: float) -> dict[str, Any]:
    """Of a plan without a program, for none could be decisive."""
    return {
        **_of_the_plan(wanted, Verdict.VACUOUS, nothing.why, seconds),
        "instead": nothing.instead,
        "acceptance": [Row(REACHES, Verdict.VACUOUS, nothing.why, 0).to_json()],
        "crashes": [],
        "masks": [],
        "findings": [],
        "limits": ["Anything at all: no weights were loaded, no program was run, no property was judged."],
    }


def _of_the_plan(wanted: Validation, verdict: Verdict, reason: str, seconds: float) -> dict[str, Any]:
    """What a record says whatever was measured."""
    plan, engine, other = wanted.plan, wanted.engine, wanted.other
    checkpoint = engine.describe()
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "verdict": verdict.value,
        "verdict_reason": reason,
        "checkpoint": {
            **{k: checkpoint[k] for k in ("name", "family", "variant", "quantisation", "parameters", "bytes", "notes")},
            "fingerprint": engine.digests.digest,
            "files": dict(engine.digests.files),
        },
        "engine": {"name": engine.name, "phrase": engine.phrase},
        **({} if other is None else {"before_engine": _told(other, wanted.sides["before"])}),
        "dtype": engine.computes_in,
        "sides": dict(wanted.sides),
        "device": engine.device,
        "versions": versions(),
        "seed": plan.asked.seed,
        "memory_estimate": wanted.estimate,
        "plan": {
            **{k: v for k, v in dataclasses.asdict(plan.asked).items() if k != "seed"},
            "chunks": [{**dataclasses.asdict(chunk), "decisive": chunk.decisive} for chunk in plan.chunks],
            "first_decisive": next((dataclasses.asdict(chunk) for chunk in plan.chunks if chunk.decisive), None),
            "trims": sum(_trims(planned) for planned in plan.programs if planned.name == BOUNDED),
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
        "command": wanted.command,
        "written": {"at": datetime.now(UTC).isoformat(timespec="seconds"), "seconds": round(seconds, 1)},
    }


def _told(engine: Engine, policy: str) -> dict[str, Any]:
    return {
        "name": engine.name,
        "phrase": engine.phrase_of(policy),
        "dtype": engine.computes_in,
        "device": engine.device,
    }


def _trims(planned: Planned) -> int:
    """How often the bound removed keys."""
    states = zip(planned.program.operations, planned.states, planned.states[1:], strict=False)
    return sum(isinstance(one, EnforceMaxKvSize) and before.live_len > after.live_len for one, before, after in states)
