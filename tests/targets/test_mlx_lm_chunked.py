"""llama4 of mlx-lm: caches that keep a window of keys, and show a chunk of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

from mlx_lm.models import llama4
from mlx_lm.models.cache import ChunkedKVCache

from harness.findings import FindingError
from harness.judge import judge_program
from harness.operations import Chunk, Decode, Operation, Prefill, Program, Rollback, SaveLoad, Verify
from harness.rules import CacheRule
from harness.targets import mlx_lm
from properties import ALL

CHUNK = 7
LIFE: tuple[Operation, ...] = (
    Prefill(5),
    Chunk(4),
    Verify(3, 1),
    SaveLoad(),
    Decode(9),
    Chunk(16),
    Rollback(2),
    Chunk(1),
    Decode(3),
)


def target() -> mlx_lm.MlxLmTarget:
    return mlx_lm.resolve("mlx_lm:llama4")[0]


def found(program: Program) -> str:
    with pytest.raises(FindingError) as caught:
        judge_program(target(), program, ALL)
    return caught.value.finding.property_id


def test_chunks_are_crossed_and_nothing_is_wrong() -> None:
    assert target().rules == (CacheRule(chunk=CHUNK, keeps=CHUNK),) * 3 + (None,)
    judge_program(target(), Program(LIFE), ALL)


def test_keys_that_the_mask_shows_to_nobody_are_no_keys_of_the_call() -> None:
    session = target().open(("pool",))
    for count, keys in ((5, 5), (4, 9), (6, 8), (1, 2), (1, 3)):
        calls = session.forward(0, range(1, count + 1)).attention
        assert [call.key_len for call in calls[:3]] == [call.mask_keys for call in calls[:3]] == [keys] * 3
    assert [told.live_len for told in session.lengths(0)] == [17 % CHUNK] * 3 + [17]
    assert [rows.positions for rows in session.rows(0)] == [tuple(range(9, 17))] * 3 + [None]


def _one_key_too_few(self: Any) -> None:
    held = self.offset - self.start_position
    if self.keys is not None and held > CHUNK - 2:
        gone = held - (CHUNK - 2)
        self.keys, self.values = self.keys[..., gone:held, :], self.values[..., gone:held, :]
        self.start_position += gone


def _start_stays(self: Any) -> None:
    held = self.offset - self.start_position
    if self.keys is not None and held > CHUNK:
        self.keys, self.values = self.keys[..., held - CHUNK : held, :], self.values[..., held - CHUNK : held, :]
        self.offset -= held - CHUNK


@pytest.mark.parametrize("trims", [_one_key_too_few, _start_stays])
def test_a_front_trim_that_is_wrong_is_found(trims: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ChunkedKVCache, "maybe_trim_front", trims)
    assert found(Program((Prefill(5), Decode(9)))) in {"keys_equal_ledger_live_length", "positions_are_absolute"}


def test_a_mask_of_a_window_in_the_place_of_chunks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of as many keys: what the cache keeps, and not what the model shows."""
    attend = llama4.scaled_dot_product_attention

    def windowed(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any) -> Any:
        if isinstance(cache, ChunkedKVCache):
            behind = mx.arange(keys.shape[2])[None] - mx.arange(-queries.shape[2], 0)[:, None] - keys.shape[2]
            mask = (behind <= 0) & (behind > -CHUNK)
        return attend(queries, keys, values, cache=cache, scale=scale, mask=mask)

    monkeypatch.setattr(llama4, "scaled_dot_product_attention", windowed)
    assert found(Program((Prefill(5), Chunk(4)))) == "mask_shows_exactly_the_visible_set"
    assert found(Program((Prefill(7), Chunk(2)))) == "keys_equal_ledger_live_length"  # 7 keys that nobody should see


@pytest.mark.parametrize(
    "operations",
    [(Prefill(6), Decode(3), Rollback(3)), (Prefill(2), Decode(7), Rollback(9)), (Prefill(8), Chunk(1), Rollback(4))],
)
def test_a_rollback_over_keys_that_are_gone_is_not_refused(operations: tuple[Operation, ...]) -> None:
    assert found(Program(operations)) == "trim_reports_what_it_removed"


def test_that_is_a_bug_by_the_forward_without_a_cache_alone() -> None:
    """By hand, without the harness: logits behind such a rollback, and of the same tokens at once."""
    model = target()._model
    caches = model.make_cache()
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    for token in tokens:
        model(mx.array([[token]]), cache=caches)
    for cache in caches:
        assert cache.is_trimmable() and cache.trim(3) == 3
    behind = np.array(model(mx.array([[7]]), cache=caches))[0, -1]
    at_once = np.array(model(mx.array([[*tokens[:6], 7]])))[0, -1]
    assert np.abs(behind - at_once).max() > 0.1


def test_a_checkpoint_is_judged_by_the_same_rules(tmp_path: Path) -> None:
    named = dict(tree_flatten(target()._model.parameters()))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), named, {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4"} | target().family.config))
    (loaded,) = mlx_lm.resolve(f"mlx_lm:{tmp_path}")
    assert loaded.rules == target().rules and loaded.windows == (None,) * 4
    judge_program(loaded, Program(LIFE), ALL)
    with pytest.raises(mlx_lm.UnknownFamily, match="start_position"):
        mlx_lm.resolve(f"mlx_lm:{tmp_path}@live-window")


def test_our_caches_are_refused_and_the_library_says_why() -> None:
    with pytest.raises(mlx_lm.UnknownFamily, match="start_position") as caught:
        mlx_lm.resolve("mlx_lm:llama4@live-window")
    assert "\n" not in str(caught.value)
    caches = target()._model.make_cache()
    target()._model(mx.array([list(range(9))]), cache=caches)
    target()._model(mx.array([[1]]), cache=caches)
    assert [cache.start_position for cache in caches[:3]] == [2] * 3 and not hasattr(caches[3], "start_position")
