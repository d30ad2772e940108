"""Layers without attention: which cache is the first, and what a model does without any."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from reference_models import nemotron_nas
from reference_models.engine import masks
from reference_models.nemotron_nas import TINY, AttentionBlock, BlockConfig, FFNBlock, Model

TOKENS = mx.array([[3, 1, 4, 1, 5, 9]])


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("plain", (0, 1)),
        ("no-op-first", (1,)),
        ("linear-first", (1, 2)),
        ("ffn-replaced", (0, 2)),
        ("llama3-rope", (0, 2)),
    ],
)
def test_only_real_attention_has_a_cache(name: str, attention: tuple[int, ...]) -> None:
    model = Model(TINY[name])
    assert model.attention_layers == attention
    caches = model.make_caches()
    assert len(caches) == len(attention)
    mx.eval(model(TOKENS, caches))
    assert [cache.offset for cache in caches] == [6] * len(attention)  # none of them stands still


@pytest.mark.parametrize("name", ["no-op-first", "linear-first"])
def test_the_mask_comes_from_the_first_attention_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(TINY[name])
    asked: list[object] = []
    original = masks.chunk_mask

    def watched(
        l: int, cache: masks.CacheLengths, policy: masks.MaskPolicy, window: int | None = None
    ) -> mx.array | None:
        asked.append(cache)
        return original(l, cache, policy, window)

    monkeypatch.setattr(masks, "chunk_mask", watched)
    caches = model.make_caches()
    mx.eval(model(TOKENS, caches))
    assert asked == [caches[0]]  # once per forward, however many layers


@pytest.mark.parametrize("kind", ["no_op", "replace_with_linear"])
def test_a_model_without_attention_is_refused(kind: str) -> None:
    blocks = (BlockConfig(AttentionBlock(**{kind: True}), FFNBlock(1.0)),) * 2
    config = replace(TINY["plain"], block_configs=blocks)
    with pytest.raises(ValueError, match="nothing to cache or mask"):
        Model(config)


def test_kv_heads_follow_the_group_of_each_layer() -> None:
    model = Model(TINY["different-groups"])
    caches = model.make_caches()
    heads: list[int] = []
    for cache in caches:
        update = cache.update_and_fetch
        cache.update_and_fetch = lambda k, v, update=update: (heads.append(k.shape[1]), update(k, v))[1]
    mx.eval(model(TOKENS, caches))
    assert heads == [1, 4, 2]


def test_parameters_have_the_names_of_the_checkpoint() -> None:
    def names(variant: str, layer: int) -> set[str]:
        prefix = f"model.layers.{layer}."
        every = [name for name, _ in tree_flatten(Model(TINY[variant]).parameters())]
        return {name.removeprefix(prefix).removesuffix(".weight") for name in every if name.startswith(prefix)}

    mlp = {"post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    attention = {"input_layernorm", *(f"self_attn.{p}_proj" for p in "qkvo")}
    assert names("no-op-first", 0) == mlp
    assert names("linear-first", 0) == {"input_layernorm", "self_attn.linear_attn"} | mlp
    assert names("ffn-replaced", 0) == attention
    assert names("ffn-replaced", 2) == attention | {"post_attention_layernorm", "mlp.linear_mlp"}
    assert names("llama3-rope", 1) == set()


def test_an_empty_layer_changes_nothing() -> None:
    block = TINY["plain"].block_configs[0]
    empty = BlockConfig(AttentionBlock(no_op=True), FFNBlock(no_op=True))
    with_empty = Model(replace(TINY["plain"], block_configs=(empty, block)))
    without = Model(replace(TINY["plain"], num_hidden_layers=1, block_configs=(block,)))
    without.model.layers[0] = with_empty.model.layers[1]
    for part in ("embed_tokens", "norm"):
        without.model[part] = with_empty.model[part]
    without.lm_head = with_empty.lm_head
    outputs = [np.array(model(TOKENS, model.make_caches())) for model in (with_empty, without)]
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("mult", "hidden", "width"),
    [(1.0, 32, 256), (5.25, 8192, 28672), (1.3125, 8192, 7168), (0.5, 8192, 2816)],
)
def test_ffn_width_is_rounded_up_to_256(mult: float, hidden: int, width: int) -> None:
    assert nemotron_nas.intermediate_size(mult, hidden) == width


@pytest.mark.parametrize("block", [AttentionBlock, FFNBlock])
def test_a_block_is_exactly_one_thing(block: type) -> None:
    for arguments in ({}, {"no_op": True, "replace_with_linear": True}):
        with pytest.raises(ValueError, match="exactly one"):
            block(**arguments)


def test_a_group_must_divide_the_heads() -> None:
    odd = BlockConfig(AttentionBlock(3), FFNBlock(1.0))
    with pytest.raises(ValueError, match=r"block_configs\[1\]: n_heads_in_group"):
        replace(TINY["plain"], block_configs=(TINY["plain"].block_configs[0], odd))
