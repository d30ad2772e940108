"""Caches that mlx-lm bounds: what the ledger says of sinks and turns, and what the library makes of them."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from harness.campaign import run_campaign
from harness.capability import Capability
from harness.findings import FindingError, Verdict
from harness.judge import judge_program
from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    Chunk,
    Decode,
    Fork,
    Prefill,
    Program,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    Verify,
)
from harness.profiles import PROFILES
from harness.rules import CacheRule
from harness.targets import mlx_lm, naming
from harness.targets.mlx_lm_catalogue import FAMILIES
from harness.targets.mlx_lm_generator import SETTINGS
from harness.targets.mlx_lm_models import library
from properties import ALL, BY_ID

BOUND = 9
WHOLE, _ = SETTINGS
TWO = ("pool", "pool")


def bounded(family: str = "qwen3", bound: int = BOUND) -> mlx_lm.MlxLmTarget:
    return mlx_lm.resolve(f"mlx_lm:{family}@max-kv-size={bound}")[0]


def heeding() -> list[str]:
    return [family for family in FAMILIES if not mlx_lm.resolve(f"mlx_lm:{family}")[0].makes_caches]


def with_sinks(cache: Any, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
    """What ``RotatingKVCache.make_mask`` would give if it kept the first keys in sight, as its decode does."""
    if N == 1:
        return None
    before = min(cache.max_size - 1, cache.offset)
    slots, rows = mx.arange(before + N)[None], mx.arange(before, before + N)[:, None]
    return (slots <= rows) & ((slots < cache.keep) | (rows < slots + (cache.max_size - cache.keep)))


class Alone(mlx_lm.MlxLmTarget):
    """Batches forget the sinks."""

    @property
    def capabilities(self) -> frozenset[Capability]:  # type: ignore[override]
        return super().capabilities - {Capability.BATCH}


def test_the_ledger_counts_as_the_library_does() -> None:
    target = bounded()
    assert set(target.rules) == {CacheRule(BOUND, 4, rewinds=False)} and set(target.windows) == {None}
    session = target.open(("pool",))
    for token in range(BOUND + 3):
        session.forward(0, (token,))
    assert session.rollback(0, 1).refused is not None
    assert {rows.positions for rows in session.rows(0)} == {(0, 1, 2, 3, 8, 9, 10, 11)}


@pytest.fixture
def in_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library, mended: what is found without this is its own, and no chunk hides anything else behind it."""
    monkeypatch.setattr(library().RotatingKVCache, "make_mask", with_sinks)  # type: ignore[attr-defined]


@pytest.mark.usefixtures("in_sight")
@pytest.mark.parametrize("family", [family for family in heeding() if family != "mistral3"])
def test_nothing_is_found_where_sinks_stay_in_sight(family: str) -> None:
    """Sinks, turns, rollbacks before a turn and their refusals behind it, copies, files; one by one and in chunks."""
    target = bounded(family)
    life = (Decode(7), Rollback(2), Chunk(2), Snapshot(0), Decode(8), Rollback(1), SaveLoad(), Chunk(13), Restore(0))
    judge_program(target, Program((*life, Verify(1, 0), Decode(9), Chunk(3))), ALL)
    judge_program(target, Program((Prefill(14), Fork(1), Decode(3, 1), Chunk(2)), TWO), ALL)


def test_sinks_that_a_window_has_left_behind_are_seen_to_be_shown() -> None:
    """mistral3 has windows and no caches of its own: as long as its window reaches the sinks, nothing is wrong."""
    target = bounded("mistral3")
    assert target.windows == (12, None, 12)
    mask = BY_ID["mask_shows_exactly_the_visible_set"]
    judge_program(target, Program((Decode(12),)), [mask])
    with pytest.raises(FindingError, match=r"shows the key at position 0 .* to the token at position 12"):
        judge_program(target, Program((Decode(13),)), [mask])


@pytest.mark.usefixtures("in_sight")
@pytest.mark.parametrize("bound", [5, 9])
def test_a_campaign_passes_where_sinks_stay_in_sight_and_nothing_is_batched(bound: int) -> None:
    name = f"max-kv-size={bound}"
    result = run_campaign(name, [Alone("qwen3", caches=name)], ALL, PROFILES["smoke"], 5)
    assert not result.found and result.verdict in (Verdict.PASS, Verdict.VACUOUS)


@pytest.mark.parametrize(
    ("program", "finds"),
    [
        (Program((Prefill(BOUND + 1),)), "mask_shows_exactly_the_visible_set"),
        (Program((Prefill(BOUND + 1),)), "outputs_equal_the_cache_free_forward"),
        (Program((Prefill(BOUND), Decode(1))), "chunks_equal_one_shot"),
        (Program((Prefill(BOUND), Batch((0,)))), "keys_equal_ledger_live_length"),
        (Program((Prefill(BOUND), Prefill(3, 1), Batch((0, 1)), BatchDecode(1)), TWO), "batch_rows_equal_solo_runs"),
    ],
)
def test_what_is_known_to_be_wrong_is_found(program: Program, finds: str) -> None:
    with pytest.raises(FindingError) as caught:
        judge_program(bounded(), program, [BY_ID[finds]])
    assert caught.value.finding.property_id == finds


def generator(bound: int, name: str = WHOLE) -> mlx_lm.MlxLmTarget:
    return mlx_lm.resolve(f"mlx_lm:qwen3@{name}@max-kv-size={bound}")[0]


@pytest.mark.parametrize(
    ("program", "finds"),
    [
        (Program((Prefill(BOUND),)), "keys_equal_ledger_live_length"),
        (Program((Prefill(3), Decode(BOUND))), "outputs_equal_the_cache_free_forward"),  # no chunk goes over the bound
    ],
)
def test_the_generator_loses_the_first_keys_of_what_it_bounds(program: Program, finds: str) -> None:
    with pytest.raises(FindingError) as caught:
        judge_program(generator(BOUND), program, [BY_ID[finds]])
    assert caught.value.finding.property_id == finds


@pytest.mark.parametrize("name", SETTINGS)
def test_a_generator_is_asked_for_its_bound_and_right_below_it(name: str) -> None:
    made = generator(40, name)
    assert made.max_kv_size == 40 and set(made.rules) == {CacheRule(40, 4, rewinds=False)}
    assert made.open(TWO)._together.max_kv_size == 40  # type: ignore[attr-defined]
    life = (Prefill(7), Prefill(3, 1), Batch((0, 1)), BatchForward((3, 5)), BatchDecode(4), Batch((1,)), Decode(5))
    judge_program(made, Program((*life, Decode(6, 1), Fork(0, 1), Chunk(9, 1)), TWO), ALL)


def test_a_generator_that_takes_no_bound_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = importlib.import_module("mlx_lm.generate").BatchGenerator
    monkeypatch.setattr(kind, "__init__", lambda self, model, prefill_step_size=1: None)
    with pytest.raises(naming.TargetError, match=r"the BatchGenerator of mlx-lm .* has no max_kv_size"):
        naming.resolve(f"mlx_lm:qwen3@{WHOLE}@max-kv-size=9", naming.Asked())


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen3@max-kv-size=4", "more than the 4 keys"),
        ("qwen3@max-kv-size=0", "more than the 4 keys"),
        ("olmo3@max-kv-size=9", "makes its caches itself"),
        ("qwen3@max-kv-size=", "@max-kv-size=N"),
        ("qwen3@max-kv-size=-9", "@max-kv-size=N"),
        ("qwen3@max-kv-size=9@live-window", "@max-kv-size=N"),
        ("qwen3@max-kv-size=9@batch-generator", "@max-kv-size=N"),
        ("qwen3@speculative@max-kv-size=9", "@max-kv-size=N"),
        ("qwen3@batch-generator@max-kv-size=4", "more than the 4 keys"),
        ("llama@batch-generator@max-kv-size=9", "makes its caches itself"),
    ],
)
def test_a_bound_that_cannot_be_is_refused_in_one_line(name: str, said: str) -> None:
    with pytest.raises(naming.TargetError) as caught:
        naming.resolve(f"mlx_lm:{name}", naming.Asked())
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_masks_of_another_policy_are_refused() -> None:
    with pytest.raises(naming.TargetError, match="no other policy"):
        naming.resolve("mlx_lm:qwen3@max-kv-size=9", naming.Asked(policy="offset"))


def test_a_target_is_rebuilt_from_what_a_trace_says_of_it() -> None:
    for made in (bounded(), generator(BOUND)):
        again = mlx_lm.target_from_identity(made.identity.to_json())
        assert again == made and again.identity == made.identity and again.max_kv_size == BOUND
