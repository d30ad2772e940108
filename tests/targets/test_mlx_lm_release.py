"""What an older release of mlx-lm cannot do is not asked of it, and a program goes on as if it had been done."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from harness.capability import Capability
from harness.judge import judge_program
from harness.operations import Batch, BatchDecode, BatchForward, Chunk, Prefill, Program, Rollback, SaveLoad
from harness.targets import mlx_lm, mlx_lm_release
from harness.targets import mlx_lm_caches as held
from harness.targets.mlx_lm_models import library
from properties import ALL

TWO = ("pool", "pool")
#: Fresh ones alone, a fresh one joins, all leave, fresh ones are reordered and joined by one that is not.
PROGRAMS = (
    Program((Batch((0,)), BatchForward((3,)), Batch((0, 1)), BatchForward((2, 4)), BatchDecode(2)), TWO),
    Program((Batch((0, 1)), Batch((1,)), Chunk(3, 0), Batch((1, 0)), BatchForward((2, 1)), BatchDecode(1)), TWO),
    Program((Batch((0, 1)), Batch((1, 0)), BatchDecode(2), Batch(()), SaveLoad(0), Chunk(2, 1)), TWO),
    Program((SaveLoad(), Prefill(3), SaveLoad(), Chunk(2))),
)


class _OfOld:
    """The library, whose caches of rows cannot do without content what older ones could not."""

    class KVCache:
        @property
        def state(self) -> Any:
            raise AttributeError("'NoneType' object has no attribute 'shape'")

        @staticmethod
        def merge(caches: Any) -> Any:
            raise ValueError("max() arg is an empty sequence")

    def __getattr__(self, name: str) -> Any:
        return getattr(library(), name)


def test_whether_speculation_asks_is_seen_by_trying(monkeypatch: pytest.MonkeyPatch) -> None:
    generation = importlib.import_module("mlx_lm.generate")
    asks = mlx_lm_release.asks_to_rewind.__wrapped__
    assert asks() is True

    def unasked(prompt: Any, model: Any, draft_model: Any, *, prompt_cache: Any) -> Any:
        draft_model(prompt)
        yield

    monkeypatch.setattr(generation, "speculative_generate_step", unasked)
    assert asks() is False


def test_what_it_cannot_do_is_seen_by_trying() -> None:
    assert mlx_lm_release.merges_nothing(library()) and mlx_lm_release.writes_nothing(library())
    assert not mlx_lm_release.merges_nothing(_OfOld()) and not mlx_lm_release.writes_nothing(_OfOld())
    assert not mlx_lm_release.merges_nothing(SimpleNamespace())


@pytest.mark.parametrize("name", ["mlx_lm:llama", "mlx_lm:cohere2", "mlx_lm:granitemoehybrid", "mlx_lm:falcon_h1"])
def test_caches_without_content_are_batched_and_kept_all_the_same(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked = []

    def no(library: Any) -> bool:
        asked.append(library)
        return False

    monkeypatch.setattr(mlx_lm_release, "merges_nothing", no)
    monkeypatch.setattr(mlx_lm_release, "writes_nothing", no)
    (target, *_) = mlx_lm.resolve(name)
    for program in PROGRAMS:
        judge_program(target, program, ALL)
    assert asked


def test_without_merge_there_are_no_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    merging, other = library().make_prompt_cache(SimpleNamespace(layers=[0])), SimpleNamespace()
    assert mlx_lm_release.batches(merging) and not mlx_lm_release.batches([*merging, other])
    (target, *_) = mlx_lm.resolve("mlx_lm:llama")
    assert Capability.BATCH in target.capabilities
    (old, *_) = mlx_lm.resolve("mlx_lm:llama")
    monkeypatch.setattr(mlx_lm_release, "batches", lambda caches: not caches)
    assert target.capabilities - old.capabilities == {Capability.BATCH}


def test_emptiness_is_known_without_the_word_for_it() -> None:
    rows = SimpleNamespace(keys=None, state=(None, None))
    states = SimpleNamespace(state=[None, None])
    assert held.is_empty(rows) and held.is_empty(states) and held.is_empty(SimpleNamespace(caches=(rows, states)))
    rows.keys = states.state[1] = 1
    assert not (held.is_empty(rows) or held.is_empty(states) or held.is_empty(SimpleNamespace(caches=(rows, states))))


def test_nothing_is_in_the_way_of_taking_nothing_away() -> None:
    (target, *_) = mlx_lm.resolve("mlx_lm:cohere2")  # whose window is full behind twelve
    judge_program(target, Program((Prefill(12), Rollback(0), Chunk(2))), ALL)
