"""The same program through the wire and in this process: the same observations, byte for byte."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.execution import execute
from harness.judging import Evidence
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    EnforceMaxKvSize,
    Fork,
    Operation,
    Owner,
    Prefill,
    Program,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.targets.naming import Asked, resolve
from harness.wire.codec import encode

ONE: tuple[Operation, ...] = (
    Prefill(9),
    TrimFront(3, 1),
    Chunk(4),
    Decode(3),
    Snapshot(0),
    Rollback(2),
    Verify(4, 1),
    SaveLoad(),
    Restore(0),
    EnforceMaxKvSize(5, "sinks"),
    Chunk(2),
    Reset(),
    Prefill(3),
)
TWO: tuple[Operation, ...] = (
    Prefill(5),
    Prefill(3, 1),
    TrimFront(2),
    Batch((0, 1)),
    BatchForward((3, 1)),
    BatchDecode(2),
    Fork(1),
    Chunk(3, 1),
)
PROGRAMS: tuple[tuple[tuple[Operation, ...], tuple[Owner, ...]], ...] = (
    (ONE, ("pool",)),
    (TWO, ("pool", "pool")),
    ((Prefill(4), Chunk(3), Prefill(2, 1), TrimFront(1, 0, 1), Decode(1, 1)), ("model", "pool")),
)
CONFIGURATIONS = (
    "qwen2_vl",
    "nemotron_nas",
    "qwen2_vl:plain:int8",
    "qwen3_vl_moe",
    "olmo3:plain:rotating-layers",
)


def seen(run: Any) -> list[str]:
    """All that was observed, as text; but for the seconds it took, and what quantised caches were given."""
    told = []
    for step in run.steps:
        said = encode([step.removal, step.copied, step.arguments, step.told, step.untold])
        forwards = [encode(replace(forward.seen, seconds=0, given=())) for forward in step.forwards]
        told.append(json.dumps([said, forwards]))
    return told


@pytest.mark.parametrize("policy", ["live", "offset"])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_all_that_is_observed_is_the_same(name: str, policy: Any) -> None:
    here = resolve(f"reference:{name}", Asked(policy)).targets[0]
    worker = f"{sys.executable} -m harness.wire.worker reference:{name}"
    subject = resolve(f"wire:{worker}", Asked(policy))
    there = subject.targets[0]
    for operations, owners in PROGRAMS:
        program = Program(operations, owners)
        for attention in (False, True):
            runs = [execute(target, program, tell=True, attention=attention) for target in (here, there)]
            for one, other in zip(seen(runs[0]), seen(runs[1]), strict=True):
                assert one == other
        free = [Evidence(run).cache_free for run in runs]
        assert type(free[0]) is type(free[1])
        if not isinstance(free[0], str) and free[0] is not None:
            assert np.array_equal(free[0].logits, free[1].logits)  # type: ignore[union-attr]
    subject.close()


def test_what_the_worker_says_it_is() -> None:
    here = resolve("reference:qwen2_vl", Asked()).targets[0]
    subject = resolve(f"wire:{sys.executable} -m harness.wire.worker reference:qwen2_vl", Asked())
    there = subject.targets[0]
    missing = here.capabilities - there.capabilities
    assert {each.name for each in missing} == {
        "WITNESS",
        "QUANTISE",
        "INT8",
        "FOOTPRINT",
    } and there.capabilities <= here.capabilities
    for name in ("vocab_size", "attention_layers", "windows", "rules", "row_storage"):
        assert getattr(here, name) == getattr(there, name)
    other = there.counterpart()
    assert other is not None and other.identity.policy == "offset" and other.counterpart() == there
    subject.close()
