"""Caches that a bug leaves in a state in which nobody can read them are a finding, and no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import properties
from harness.cli import main
from harness.execution import execute
from harness.operations import Batch, BatchForward, Prefill, Program, Rollback
from harness.target import CacheMemory
from harness.targets import reference
from harness.targets.reference import targets
from harness.targets.reference_session import ReferenceSession
from reference_models.engine.batch_cache import BatchKVCache
from reference_models.engine.kv_cache import KVCache
from reference_models.engine.paged import PagedKVCache

COMPLETES = "every_operation_completes"


def broken(*_: Any, **__: Any) -> Any:
    raise ValueError("not enough blocks")


def test_a_run_reports_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that stay behind a rollback: the table and the length no longer fit, and reading the rows raises."""
    monkeypatch.setattr(PagedKVCache, "rollback", KVCache.rollback)
    name = "reference:nemotron_nas:plain:paged-4"
    assert main(["run", "--target", name, "--profile", "smoke", "--out", str(tmp_path)]) == 1
    (record,) = (json.loads(path.read_text()) for path in (tmp_path / "targets").glob("*.json"))
    assert record["verdict"] == "FAIL" and not list(tmp_path.rglob("*.partial"))
    (found,) = (found for found in record["findings"] if found["property"] == COMPLETES)
    assert "its caches cannot be read: " in found["message"] and "Rollback(" in found["program"]
    (trace,) = (tmp_path / "findings").glob(f"{COMPLETES}-*.json")
    assert main(["replay", str(trace)]) == 1
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("method", ["rows", "lengths", "memory"])
def test_whatever_cannot_be_told(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceSession, method, broken)
    (step,) = execute(reference.targets("mistral4")[0], Program((Prefill(2),))).steps
    assert step.error == "its caches cannot be read: ValueError: not enough blocks"


def test_a_misuse_is_still_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacks(*_: Any) -> Any:
        raise NotImplementedError("says no memory")

    monkeypatch.setattr(ReferenceSession, "memory", lacks)
    with pytest.raises(NotImplementedError):
        execute(reference.targets("mistral4")[0], Program((Prefill(2),)))


def test_a_batch_that_cannot_be_made_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchKVCache, "prepare", broken)
    batch = Program((Prefill(2), Prefill(1, 1), Batch((0, 1)), BatchForward((1, 2))), ("pool", "pool"))
    last = execute(reference.targets("mistral4")[0], batch).steps[-1]
    assert last.error == "ValueError: not enough blocks"
    assert [forward.sequence for forward in last.forwards] == [0, 1]


def test_a_rollback_behind_which_no_length_can_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    target = reference.targets("mistral4")[0]
    session = target.open(("pool",))
    session.forward(0, [1, 2, 3])
    monkeypatch.setattr(type(session._pool), "lengths_of", broken)
    seen = session.rollback(0, 1)
    assert (seen.removed, seen.error) == ((), "ValueError: not enough blocks")
    assert Rollback(1).text() == "Rollback(1)" and COMPLETES in properties.BY_ID


def test_a_batch_cache_of_mlx_lm_that_cannot_give_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pytest.importorskip("mlx_lm.models.cache", reason="mlx-lm is not installed")
    from harness.targets import mlx_lm

    monkeypatch.setattr(cache.BatchKVCache, "extract", broken)
    batch = Program((Prefill(2), Prefill(1, 1), Batch((0, 1)), BatchForward((1, 2))), ("pool", "pool"))
    (target,) = mlx_lm.resolve("mlx_lm:llama")[:1]
    last = execute(target, batch).steps[-1]
    assert last.error == "its caches cannot be read: ValueError: not enough blocks"
    monkeypatch.undo()
    monkeypatch.setattr(cache.BatchKVCache, "prepare", broken)
    assert execute(target, batch).steps[-1].error == "ValueError: not enough blocks"


@pytest.mark.parametrize("name", ["lengths", "rows", "memory"])
def test_caches_of_some_layers_alone_are_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """What is compared as far as it goes proves nothing of the other layers."""
    told = getattr(ReferenceSession, name)
    monkeypatch.setattr(ReferenceSession, name, lambda self, sequence: told(self, sequence)[:1])
    target = next(each for each in targets("qwen2_vl") if len(each.attention_layers) > 1)
    step = execute(target, Program((Prefill(3),))).steps[-1]
    assert step.error is not None and f"its caches cannot be read: {name} of 1 caches" in step.error


@pytest.mark.parametrize("size", [-1, float("nan"), None], ids=["negative", "nan", "nothing"])
def test_bytes_that_are_no_number_are_found(monkeypatch: pytest.MonkeyPatch, size: Any) -> None:
    target = targets("qwen2_vl")[0]
    caches = (CacheMemory(size, 4),) * len(target.attention_layers)
    monkeypatch.setattr(ReferenceSession, "memory", lambda self, sequence: caches)
    step = execute(target, Program((Prefill(3),))).steps[-1]
    assert step.error is not None and "bytes of cache 0" in step.error
