"""The schedules of ``batch_runs`` find each of these bugs in every family that can have it, one planted at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from kv_harness_batch_bugs import (
    extend_aligns_left,
    filter_forgets_padding,
    padding_counts,
    rollback_moves_the_shared_end,
)
from kv_harness_batch_runs import Run, reader

from reference_models import mistral4, prompt_rows, registry, rope
from reference_models.engine import BatchKVCache, masks
from reference_models.engine.batch_masks import batch_mask
from reference_models.engine.batch_rows import BatchLengths

Patch = pytest.MonkeyPatch
MODELS = {
    "mistral4": "experts-latent",
    "nemotron_nas": "different-groups",
    "qwen2_vl": "vision",
    "qwen3_vl": "vision",
    "qwen3_vl_moe": "vision",
}
VISION = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
DEEPSTACK = VISION[1:]
SEEDS = range(12)


def one_array_for_all_layers(patch: Patch) -> None:
    """The caches of all layers share one array of offsets, and every append writes to it in place."""
    shared: list[mx.array] = []

    def offset(self: Any) -> mx.array:
        if not shared:
            shared.append(mx.array([[row.offset] for row in self._rows], dtype=mx.int32))
        return shared[0]

    update = BatchKVCache.update_and_fetch

    def written(self: Any, keys: mx.array, values: mx.array) -> Any:
        grown = mx.array([[n] for n in self.prepared or (keys.shape[2],) * self.batch], dtype=mx.int32)
        if shared:
            shared[0] += grown
        return update(self, keys, values)

    def renewed(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any) -> Any:
            shared.clear()
            return original(self, *arguments)

        return call

    patch.setattr(BatchLengths, "offset", property(offset))
    patch.setattr(BatchKVCache, "update_and_fetch", written)
    for name in ("filter", "extend", "rollback", "trim_front"):
        patch.setattr(BatchKVCache, name, renewed(getattr(BatchKVCache, name)))


def offset_of_the_first_row(patch: Patch) -> None:
    """All rows stand where the first one does."""

    def offset(self: Any) -> mx.array:
        return mx.array([[self._rows[0].offset] for _ in self._rows], dtype=mx.int32)

    patch.setattr(BatchLengths, "offset", property(offset))


def padding_is_seen(patch: Patch) -> None:
    """The mask is that of rows without padding at the left."""

    def mask(l: int, cache: Any, policy: Any = "live", window: int | None = None, lengths: Any = None) -> Any:
        made = batch_mask(l, cache, policy, window, lengths)
        if made is None:
            return None
        return made | (cache.key_positions(l) < 0)[:, None, None]

    patch.setattr(masks, "batch_mask", mask)


def padding_by_offset(patch: Patch) -> None:
    """Padding and positions in the mask are those of rows that were never trimmed."""

    def positions(self: Any, l: int) -> mx.array:
        slots = mx.arange(self.slots + l, dtype=mx.int32)
        last = mx.array([[row.offset - self.slots] for row in self._rows], dtype=mx.int32).reshape(self.batch, 1)
        return mx.maximum(slots + last, -1)

    patch.setattr(BatchLengths, "key_positions", positions)


def no_axis_for_the_heads(patch: Patch) -> None:
    """``[B, l, slots + l]``: where there are as many rows as heads, each head takes the mask of a row."""

    def mask(*arguments: Any) -> Any:
        made = batch_mask(*arguments)
        return None if made is None else made[:, 0]

    patch.setattr(masks, "batch_mask", mask)


def absorbed_form_forgets_the_mask(patch: Patch) -> None:
    """MLA's form for one token takes its rope scores for the mask, and the mask is lost."""
    original = mistral4.LatentAttention._attend_absorbed
    patch.setattr(mistral4.LatentAttention, "_attend_absorbed", lambda self, *rows: original(self, *rows[:-1], None))


def query_scale_of_the_first_row(patch: Patch) -> None:
    original = rope.absolute_query_scale
    patch.setattr(
        rope,
        "absolute_query_scale",
        lambda positions, *rest: original(
            mx.broadcast_to(positions[:1], positions.shape) if positions.ndim == 2 else positions, *rest
        ),
    )


def delta_of_the_first_row(patch: Patch) -> None:
    """What an image saved in the first row is taken for saved in every row."""
    original = rope.text_position_ids
    patch.setattr(
        rope,
        "text_position_ids",
        lambda offset, delta, *rest: original(
            offset, mx.broadcast_to(delta[:1], delta.shape) if isinstance(delta, mx.array) else delta, *rest
        ),
    )


def prompts_in_another_order(patch: Patch) -> None:
    """The rows of DeepStack come to the wrong sequences."""
    original = prompt_rows.lay_over

    def lay_over(*arguments: Any) -> Any:
        x, ids, deepstack = original(*arguments)
        return x, ids, tuple(layer[::-1] for layer in deepstack)

    patch.setattr(prompt_rows, "lay_over", lay_over)


BUGS: dict[Callable[[Patch], None], tuple[str, ...]] = {
    one_array_for_all_layers: tuple(MODELS),
    offset_of_the_first_row: tuple(MODELS),
    padding_is_seen: tuple(MODELS),
    padding_by_offset: tuple(MODELS),
    padding_counts: tuple(MODELS),
    filter_forgets_padding: tuple(MODELS),
    extend_aligns_left: tuple(MODELS),
    rollback_moves_the_shared_end: tuple(MODELS),
    absorbed_form_forgets_the_mask: ("mistral4",),
    query_scale_of_the_first_row: ("mistral4",),
    delta_of_the_first_row: VISION,
    prompts_in_another_order: DEEPSTACK,
}
CASES = [(plant, family) for plant, families in BUGS.items() for family in families]
_models: dict[str, Any] = {}


def model_of(family: str) -> Any:
    if family not in _models:
        (variant,) = (v for v in registry.variants(family) if v.name == MODELS[family])
        _models[family] = variant.build(seed=3)
    return _models[family]


def search(family: str) -> None:
    """Schedules until one fails."""
    model = model_of(family)
    for seed in SEEDS:
        Run(model, 2 + seed % 3, seed, reader=reader(model) if family in VISION else None).steps(6)


@pytest.mark.parametrize(("plant", "family"), CASES, ids=[f"{plant.__name__}-{family}" for plant, family in CASES])
def test_the_schedules_find(plant: Callable[[Patch], None], family: str, monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        search(family)


@pytest.mark.parametrize("family", MODELS)
def test_the_schedules_find_nothing_where_nothing_is(family: str) -> None:
    search(family)


@pytest.mark.parametrize("family", MODELS)
def test_a_mask_without_an_axis_for_the_heads_is_found(family: str, monkeypatch: Patch) -> None:
    """With four rows as there are four query heads it fits, and the numbers must tell; any other batch is refused, one
    of as many rows as there are KV heads (two here) too, because MLX spreads a mask over the heads of the queries."""
    model = model_of(family)
    assert model.config.num_attention_heads == 4
    no_axis_for_the_heads(monkeypatch)
    for batch, error, said in (
        (2, ValueError, "broadcast"),
        (3, ValueError, "broadcast"),
        (4, AssertionError, "forward"),
    ):
        with pytest.raises(error, match=said):
            Run(model, batch, seed=1).padded()
