"""mlx-vlm over the wire: the same observations as in this process, and the bugs of its old releases, planted in the one
that is installed, are found by an ordinary campaign."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_vlm", reason="mlx-vlm is not installed: pip install 'mlx-kv-harness[mlx-vlm]'")

import properties
from harness.campaign import run_campaign
from harness.execution import execute
from harness.judging import Evidence
from harness.media import Media
from harness.museum import exhibits
from harness.operations import Chunk, Decode, Operation, Prefill, Program, Reset, Rollback
from harness.profiles import PROFILES
from harness.targets.mlx_vlm_models import version
from harness.targets.naming import Asked, resolve
from harness.wire.check import checks
from harness.wire.codec import encode

LIFE: tuple[Operation, ...] = (Chunk(5), Decode(2), Rollback(3), Chunk(2), Reset(), Prefill(3), Chunk(2), Decode(1))
IMAGE = Media(2, 2, 3)
EXHIBITS = {one.name: one for one in exhibits()}


@pytest.fixture(autouse=True)
def _from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find what this process finds."""
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))


def worker(name: str, bug: str = "none") -> str:
    return f"{sys.executable} {Path(__file__).parent / 'broken.py'} {bug} mlx_vlm:{name}"


def logits(run: Any) -> list[str]:
    return [str(encode(forward.seen.logits)) for step in run.steps for forward in step.forwards]


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_vl+images", "qwen3_vl+images"])
def test_what_is_observed_is_the_same(name: str) -> None:
    here = resolve(f"mlx_vlm:{name}", Asked()).targets[0]
    program = Program((Prefill(4, media=(IMAGE,) if here.images else ()), *LIFE))
    with closing(resolve(f"wire:{sys.executable} -m harness.wire.worker mlx_vlm:{name}", Asked())) as subject:
        runs = [execute(target, program, tell=True) for target in (here, subject.targets[0])]
        assert logits(runs[0]) == logits(runs[1])
        free: list[Any] = [Evidence(run).cache_free for run in runs]
        assert np.array_equal(free[0].logits, free[1].logits)
        assert f"mlx-vlm {version()}" in str(subject.targets[0].identity.detail)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl+images"])
def test_the_worker_passes_the_check(name: str) -> None:
    command = f"{sys.executable} -m harness.wire.worker mlx_vlm:{name}"
    assert [check for check in checks(command, 60) if check.verdict == "FAIL"] == []


@pytest.mark.parametrize(
    ("bug", "name", "exhibit", "finds"),
    [
        pytest.param("whole-ids", "qwen2_vl", "mrope-chunk-ids", "positions_are_absolute", id="whole-ids-text"),
        pytest.param("whole-ids", "qwen2_vl+images", "mrope-chunk-ids", "chunks_equal_one_shot", id="whole-ids-images"),
        pytest.param("not-kept", "qwen2_vl", "mrope-delta-lost", "positions_are_absolute", id="not-kept-text"),
        pytest.param("not-kept", "qwen2_vl+images", "mrope-delta-lost", "positions_are_absolute", id="not-kept-images"),
        pytest.param("none", "qwen2_vl", "", "", id="none-text"),
        pytest.param("none", "qwen2_vl+images", "", "", id="none-images"),
    ],
)
def test_a_bug_of_an_old_release_is_found(bug: str, name: str, exhibit: str, finds: str) -> None:
    """The first thing that is found. Ids that are not sliced are cut here, so that they fit: a release that has the bug
    raises on a CPU."""
    with closing(resolve(f"wire:{worker(name, bug)}", Asked())) as subject:
        result = run_campaign("wire-mlx-vlm", subject.targets, properties.ALL, PROFILES["smoke"], 5, first_only=True)
    if not exhibit:
        assert not result.found
        return
    (found,) = (each.finding for each in result.found)
    assert (found.property_id, found.reproducible) == (finds, True)
    assert len(found.program.operations) <= 2
    assert EXHIBITS[exhibit].package == "mlx-vlm"
    if exhibit == "mrope-delta-lost":
        assert EXHIBITS[exhibit].says in found.message
