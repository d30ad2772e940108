"""Drawn configurations: each builds, the awkward ones come up, the first options are the simple ones."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from reference_models import registry
from reference_models.drawing import VISION_FAMILIES, draw_config
from reference_models.weights import randomise
from tests.reference_models.awkward import COHERE2, OLMO3, SCALED, SIGMOID, Awkward

DRAWS = 2000
PATHS = [(family, False) for family in registry.FAMILIES] + [(family, True) for family in VISION_FAMILIES]
IDS = [f"{family}-{'images' if images else 'text'}" for family, images in PATHS]

MISTRAL4: Awkward = {
    "one layer": lambda c: c.num_hidden_layers == 1,
    "four layers": lambda c: c.num_hidden_layers == 4,
    "one head": lambda c: c.num_attention_heads == 1,
    "one expert": lambda c: c.n_routed_experts == 1,
    "all experts chosen": lambda c: c.num_experts_per_tok == c.n_routed_experts > 1,
    "some groups": lambda c: 1 < c.topk_group < c.n_group,
    "every group": lambda c: c.topk_group == c.n_group > 1,
    "all dense": lambda c: c.first_k_dense_replace == c.num_hidden_layers,
    "all sparse": lambda c: c.first_k_dense_replace == 0,
    "no q lora": lambda c: c.q_lora_rank is None,
    "not interleaved": lambda c: not c.rope_interleave,
    "tied": lambda c: c.tie_word_embeddings,
    "biases": lambda c: c.attention_bias,
    "unequal mscale": lambda c: c.rope_parameters.mscale not in (0.0, c.rope_parameters.mscale_all_dim),
    "no mscale_all_dim": lambda c: c.rope_parameters.mscale_all_dim == 0,
    "nothing stretched": lambda c: c.rope_parameters.factor == 1,
    "query scale moves within 20 tokens": lambda c: c.rope_parameters.original_max_position_embeddings < 20,
    "values narrower than keys": lambda c: c.v_head_dim < c.qk_nope_head_dim,
}


def _first(word: str) -> Callable[[Any], bool]:
    return lambda config: getattr(config.block_configs[0].attention, word)


NEMOTRON: Awkward = {
    "no-op first": _first("no_op"),
    "linear first": _first("replace_with_linear"),
    "one attention of four": lambda c: c.num_hidden_layers == 4 and len(c.attention_layers) == 1,
    "all attention": lambda c: len(c.attention_layers) == c.num_hidden_layers == 4,
    "an empty layer": lambda c: any(block.attention.no_op and block.ffn.no_op for block in c.block_configs),
    "ratios differ": lambda c: (
        len({c.block_configs[index].attention.n_heads_in_group for index in c.attention_layers}) > 1
    ),
    "one KV head for several": lambda c: any(
        block.attention.n_heads_in_group == c.num_attention_heads > 1 for block in c.block_configs
    ),
    "llama3": lambda c: c.rope_scaling is not None,
    "plain rope": lambda c: c.rope_scaling is None,
    "widths differ": lambda c: len({block.ffn.ffn_mult for block in c.block_configs} - {None}) > 1,
    "tied": lambda c: c.tie_word_embeddings,
    "biases": lambda c: c.attention_bias and c.mlp_bias,
}
QWEN: Awkward = {
    "one KV head for several": lambda c: c.num_key_value_heads == 1 < c.num_attention_heads,
    "every head its own": lambda c: c.num_key_value_heads == c.num_attention_heads > 1,
    "three KV heads": lambda c: c.num_key_value_heads == 3,
    "T alone": lambda c: c.rope_scaling.mrope_section[1:] == (0, 0),
    "T, H and W": lambda c: all(c.rope_scaling.mrope_section),
    "four layers": lambda c: c.num_hidden_layers == 4,
    "tied": lambda c: c.tie_word_embeddings,
    "odd vocabulary": lambda c: c.vocab_size % 2 == 1,
}
QWEN3 = QWEN | {
    "biases": lambda c: c.attention_bias,
    "heads wider than the model": lambda c: c.head_dim * c.num_attention_heads > c.hidden_size,
}
MOE = QWEN3 | {
    "one expert": lambda c: c.num_experts == 1,
    "all experts chosen": lambda c: c.num_experts_per_tok == c.num_experts > 1,
    "dense and sparse layers": lambda c: 0 < sum(map(c.is_sparse, range(c.num_hidden_layers))) < c.num_hidden_layers,
    "a dense layer by name": lambda c: bool(c.mlp_only_layers) and c.decoder_sparse_step == 1,
}
TOWER: Awkward = {
    "one block": lambda c: c.vision.depth == 1,
    "merge 3": lambda c: c.vision.spatial_merge_size == 3,
    "no merge": lambda c: c.vision.spatial_merge_size == 1,
    "one frame a patch": lambda c: c.vision.temporal_patch_size == 1,
    "three heads": lambda c: c.vision.num_heads == 3,
}
TOWER3 = TOWER | {
    "no deepstack": lambda c: not c.vision.deepstack_visual_indexes,
    "deepstack in every layer": lambda c: len(c.vision.deepstack_visual_indexes) == c.num_hidden_layers,
    "deepstack out of order": lambda c: (
        list(c.vision.deepstack_visual_indexes) != sorted(c.vision.deepstack_visual_indexes)
    ),
    "a table of one": lambda c: c.vision.num_position_embeddings == 1,
}
AWKWARD: dict[str, tuple[Awkward, Awkward]] = {
    "cohere2": (COHERE2, {}),
    "glm4_moe_lite": (SIGMOID, {}),
    "minicpm3": (SCALED, {}),
    "mistral4": (MISTRAL4, {}),
    "nemotron_nas": (NEMOTRON, {}),
    "olmo3": (OLMO3, {}),
    "qwen2_vl": (QWEN, TOWER),
    "qwen3_vl": (QWEN3, TOWER3),
    "qwen3_vl_moe": (MOE, TOWER3),
}


def build(family: str, config: Any) -> Any:
    return importlib.import_module(f"reference_models.{family}").Model(config)


@pytest.mark.parametrize(("family", "images"), PATHS, ids=IDS)
def test_every_drawn_configuration_builds_and_the_awkward_ones_come_up(family: str, images: bool) -> None:
    text, vision = AWKWARD[family]
    wanted = text | vision if images else text
    seen: Counter[str] = Counter()
    for seed in range(DRAWS):
        config = draw_config(family, random.Random(seed).choice, images=images)
        assert ((getattr(config, "vision", None)) is not None) == images
        assert tree_flatten(build(family, config).parameters())
        seen.update(name for name, holds in wanted.items() if holds(config))
    rare = {name: seen[name] for name in wanted if seen[name] < DRAWS // 200}
    assert not rare, f"of {DRAWS} draws only {rare}"


@pytest.mark.parametrize(("family", "images"), PATHS, ids=IDS)
def test_a_drawn_configuration_runs(family: str, images: bool) -> None:
    for seed in range(20):
        config = draw_config(family, random.Random(seed).choice, images=images)
        model = build(family, config)
        randomise(model, seed)
        caches = model.make_caches()
        for tokens in ([[1, 2, 3, 4, 5]], [[6]], [[7, 8]]):
            assert mx.isfinite(model(mx.array(tokens), caches)).all().item()


@pytest.mark.parametrize(("family", "images"), PATHS, ids=IDS)
def test_the_first_options_are_the_simplest(family: str, images: bool) -> None:
    """What a search shrinks to: one layer, no grouping, untied, nothing replaced."""
    config = draw_config(family, lambda options: options[0], images=images)
    assert config.num_hidden_layers == 1 and not config.tie_word_embeddings
    if images:
        assert config.vision.depth == 1
    if family == "nemotron_nas":
        assert config.attention_layers == (0,) and config.rope_scaling is None
    if family == "qwen3_vl_moe":
        assert config.mlp_only_layers == () and config.num_experts_per_tok == 1


@pytest.mark.parametrize(("family", "images"), PATHS, ids=IDS)
def test_hypothesis_is_a_chooser(family: str, images: bool) -> None:
    seen = []

    @settings(max_examples=10, database=None, deadline=None, derandomize=True)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        def choose(options: Sequence[Any]) -> Any:
            return data.draw(st.sampled_from(options))

        seen.append(draw_config(family, choose, images=images))

    run()
    assert len(set(seen)) > 5


def test_a_seed_gives_the_same_configuration() -> None:
    for family, images in PATHS:
        first, again = (draw_config(family, random.Random(7).choice, images=images) for _ in range(2))
        assert first == again


@pytest.mark.parametrize("family", [family for family in registry.FAMILIES if family not in VISION_FAMILIES])
def test_images_need_a_tower(family: str) -> None:
    with pytest.raises(ValueError, match="no vision tower"):
        draw_config(family, random.Random(0).choice, images=True)


def test_an_unknown_family_is_named() -> None:
    with pytest.raises(ValueError, match="'qwen9'"):
        draw_config("qwen9", random.Random(0).choice)
