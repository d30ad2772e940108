"""The witness and the models in MLX, written apart, agree over drawn configurations, to 5e-5 of their deviation."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from harness.comparison import allowed
from reference_models import registry, witness
from reference_models.drawing import draw_config
from reference_models.engine import NoCache
from reference_models.prompt import Prompt
from reference_models.witness import parts

CONFIGURATIONS = 10  # of each family and storage
TOKENS = 20


def drawn(family: str, seed: int) -> registry.Variant:
    choose = random.Random(seed).choice
    config = draw_config(family, choose, windows=True)
    return registry.Variant(family, "drawn-1", config, choose(registry.OPTIONS.get(family, ({},))), drawn=True)


def weights_of(model: Any) -> dict[str, Any]:
    return {name: np.array(array).astype(np.float64) for name, array in tree_flatten(model.parameters())}


class Pair:
    """A model and its witness, asked the same: random tokens, rising positions, and a random part of what causality
    allows to be seen."""

    def __init__(self, variant: registry.Variant, seed: int, count: int = TOKENS):
        self.variant, self.model = variant, variant.build(seed)
        self.weights = weights_of(self.model)
        rng = np.random.default_rng(seed)
        self.tokens = rng.integers(0, variant.config.vocab_size, count)
        self.positions = np.sort(rng.integers(0, 2 * count, count))
        causal = np.tri(count, dtype=bool)
        self.visible = causal & ((rng.random((count, count)) < 0.6) | np.eye(count, dtype=bool))
        self.windows = getattr(self.model, "windows", (None,) * len(self.model.attention_layers))

    def shown(self, window: int | None) -> Any:
        near = self.positions[:, None] - self.positions < (window or 10**9)
        return self.visible & near

    def witness(self, storage: str = "rows", **changes: Any) -> witness.Testimony:
        given = {
            "tokens": self.tokens,
            "positions": self.positions,
            "visible": tuple(self.shown(window) for window in self.windows),
            "cache_form": self.variant.options.get("cache_form", "latent"),
        } | changes
        return witness.forward(
            self.variant.family, self.variant.config, self.weights, witness.Sequence(**given), storage
        )

    def mlx(self, storage: Any = "rows") -> Any:
        tokens, positions = mx.array(self.tokens[None]), mx.array(self.positions.astype(np.int32))
        masks = {window: mx.array(self.shown(window)) for window in self.windows}
        model: Any = self.model
        if not hasattr(model, "read"):
            return np.array(model(tokens, [NoCache(positions, storage) for _ in self.windows], masks)[0])
        places = mx.broadcast_to(positions, (3, 1, len(self.tokens)))
        prompt = Prompt(tokens, model.model.embed_tokens(tokens), places, 0)
        return np.array(model(tokens, [NoCache(0, storage) for _ in self.windows], masks, prompt=prompt)[0])


@pytest.mark.parametrize("storage", ["rows", "int8"])
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_the_witness_and_the_model_agree(family: str, storage: str) -> None:
    strictly = 0
    for seed in range(CONFIGURATIONS):
        pair = Pair(drawn(family, seed), seed)
        said, got = pair.witness(storage), pair.mlx(storage)
        off = np.abs(got - said.logits).max(axis=-1) / said.logits.std()
        limits, strict = allowed("float32", pair.positions, said.gaps.choice, said.gaps.rounding)
        assert (off <= limits).all(), (pair.variant.config, off, limits)
        assert off[strict].max(initial=0) <= 5e-5
        strictly += int(strict.sum())
    assert strictly >= CONFIGURATIONS * TOKENS * (0.95 if storage == "rows" else 0.3)


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_the_witness_agrees_with_chunks_over_a_cache(family: str) -> None:
    for variant in registry.variants(family):
        pair = Pair(variant, 5)
        count = len(pair.tokens)
        behind = np.arange(count)[:, None] - np.arange(count)
        visible = tuple((behind >= 0) & (behind < (window or count)) for window in pair.windows)
        said = pair.witness(positions=np.arange(count), visible=visible)
        model: Any = pair.model
        caches = model.make_caches()
        cuts = [0, 7, 8, 9, count]
        parts = [model(mx.array(pair.tokens[None, a:b]), caches) for a, b in pairwise(cuts)]
        got = np.array(mx.concatenate(parts, axis=1)[0])
        decided = said.gaps.choice > 2e-5
        assert np.abs(got - said.logits).max(axis=-1)[decided].max() <= 5e-5 * said.logits.std()
        assert decided.mean() > 0.5


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_whoever_is_not_visible_plays_no_part(family: str) -> None:
    """Another token in a column that a row does not show, directly or through others, changes nothing in that row."""
    pair = Pair(registry.variants(family)[1], 3)
    pair.visible[:, 4] = False
    pair.visible[4] = False
    pair.visible[4, 4] = True
    before = pair.witness().logits
    pair.tokens[4] = (pair.tokens[4] + 1) % pair.variant.config.vocab_size
    after = pair.witness().logits
    rest = np.arange(TOKENS) != 4
    # Not to the last bit: an expert multiplies its tokens together, and another of them may change how it adds up.
    assert np.abs(before[rest] - after[rest]).max() < 1e-12 and not np.allclose(before[4], after[4])
    pair.visible[9, 4] = True
    assert not np.allclose(pair.witness().logits[9], before[9])


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_layer_has_its_own_matrix(family: str) -> None:
    """In the last attention layer alone the last token is blinded: no other answer changes, its own does."""
    for variant in registry.variants(family):
        pair = Pair(variant, 4)
        before = pair.witness().logits
        shown = [pair.shown(window) for window in pair.windows]
        shown[-1] = shown[-1].copy()
        seen = shown[-1][-1].copy()
        shown[-1][-1] = np.arange(TOKENS) == TOKENS - 1
        after = pair.witness(visible=tuple(shown)).logits
        assert np.abs(before - after)[:-1].max() <= 1e-12
        assert (np.abs(before - after)[-1].max() > 1e-6) == (seen.sum() > 1)


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_blocks_of_queries_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(drawn(family, 2), 2)
    whole = pair.witness().logits
    monkeypatch.setattr(parts, "BLOCK", 3)
    monkeypatch.setattr(parts, "THREADED", 1 << 13)
    assert np.abs(pair.witness().logits - whole).max() <= 1e-12


def test_near_ties_reach_whoever_rests_on_them() -> None:
    """Two experts made equal: the token that is routed between them has no gap, nor has any that sees it."""
    config = registry.variants("qwen3_vl_moe")[1].config
    variant = registry.Variant("qwen3_vl_moe", "drawn-1", config, {}, drawn=True)
    pair = Pair(variant, 1)
    gaps = pair.witness().gaps
    assert np.isfinite(gaps.choice).all() and np.isinf(gaps.rounding).all()
    first = "model.layers.0.mlp.gate.weight"
    pair.weights[first] = np.repeat(pair.weights[first][:1], config.num_experts, axis=0)
    assert (pair.witness().gaps.choice == 0).all()
    pair.weights[first][:] = 0
    pair.weights[first][0, :] = 1e3  # now one expert leads by far wherever the sign is right, and the others tie
    tied = pair.witness().gaps.choice
    assert (tied == 0).all()  # two of four are taken: the second always is one of three equal ones


def test_a_rounding_that_may_go_either_way_is_told() -> None:
    gaps = witness.Gaps(3)
    rows = np.array([[[127.0, 10.5, 3.0], [127.0, 10.25, 3.0], [127.0, 10.0, 3.0]]])  # scale 1
    stored = witness.Rows("int8", gaps).stored(rows)
    assert stored[0].tolist() == [[127, 10, 3], [127, 10, 3], [127, 10, 3]]
    assert gaps.rounding[0] == 0 and gaps.rounding[1] == pytest.approx(127 * 2**-12)  # the fp16 below 1 is half as far
    gaps.attended(np.tri(3, dtype=bool) & ~np.array([[0, 0, 0], [0, 0, 0], [1, 0, 0]], bool))
    assert gaps.rounding[1] == 0 and gaps.rounding[2] > 0  # token 2 does not see token 0 in this layer


def test_int8_rows_are_those_of_the_engine() -> None:
    from reference_models.engine.int8 import dequantise_rows, quantise_rows

    rng = np.random.default_rng(0)
    rows = (rng.standard_normal((3, 200, 8)) * np.exp(rng.uniform(-20, 8, (3, 200, 1)))).astype(np.float32)
    rows[0, 0] = 0
    gaps = witness.Gaps(200)
    mine = witness.Rows("int8", gaps).stored(rows.astype(np.float64))
    theirs = np.array(dequantise_rows(*quantise_rows(mx.array(rows)[None]), mx.float32)[0])
    decided = gaps.rounding > 1e-4
    assert decided.mean() > 0.5
    assert (mine.astype(np.float32)[:, decided] == theirs[:, decided]).all()
