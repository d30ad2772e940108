"""Drawing of the text families that came after the first five; see ``drawing`` for what a chooser is."""

from collections.abc import Sequence
from typing import Any

from reference_models import cohere2, glm4_moe_lite, minicpm3, olmo3
from reference_models.choosing import Choose, flag, grouped_heads, layers, vocabulary
from reference_models.layers import LayerType

#: Windows, in tokens: smaller than a chunk, hardly larger, so small that a token sees its neighbour or itself alone.
_WINDOWS = (4, 3, 2, 1, 8)


def _types(choose: Choose, count: int) -> tuple[LayerType, ...]:
    """Of every layer on its own."""
    kinds: Sequence[LayerType] = ("sliding_attention", "full_attention")
    return tuple(choose(kinds) for _ in range(count))


def cohere2_config(choose: Choose, _images: bool) -> cohere2.Config:
    """Patterns from "every layer sees everything" to "none does", the default one, or any choice of layers."""
    count = layers(choose)
    heads, kv_heads, head_dim = grouped_heads(choose)
    how: dict[str, Any] = {"sliding_window_pattern": choose((2, 1, 3, 4, 5, None))}
    if flag(choose):
        how = {"layer_types": _types(choose, count)}
    return cohere2.Config(
        vocab_size=vocabulary(choose),
        hidden_size=heads * head_dim,
        intermediate_size=choose((32, 24, 40)),
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        sliding_window=choose(_WINDOWS),
        rope_theta=choose((100.0, 10000.0, 50000.0)),
        layer_norm_eps=choose((1e-5, 1e-6)),
        logit_scale=choose((0.25, 0.0625, 1.0)),
        tie_word_embeddings=flag(choose),
        **how,
    )


def _olmo3_yarn(choose: Choose) -> olmo3.YarnScaling:
    """Contexts of a few positions; the first betas put both ends of the ramp inside a head of a few pairs."""
    fast, slow = choose(((0.3, 0.05), (32.0, 1.0), (4.0, 1.0)))
    return olmo3.YarnScaling(
        factor=choose((4.0, 1.0, 8.0)),
        original_max_position_embeddings=choose((8, 16, 64)),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=choose((None, 1.3)),
    )


def olmo3_config(choose: Choose, _images: bool) -> olmo3.Config:
    """Every fourth layer sees everything, or any choice of layers; stretched or not."""
    count = layers(choose)
    heads, kv_heads, head_dim = grouped_heads(choose)
    return olmo3.Config(
        vocab_size=vocabulary(choose),
        hidden_size=heads * head_dim,
        intermediate_size=choose((32, 24, 40)),
        num_hidden_layers=count,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        sliding_window=choose(_WINDOWS),
        layer_types=_types(choose, count) if choose((True, True, False)) else None,
        rope_theta=choose((100.0, 10000.0, 500000.0)),
        rope_scaling=_olmo3_yarn(choose) if flag(choose) else None,
        rms_norm_eps=choose((1e-6, 1e-5)),
        attention_bias=flag(choose),
        tie_word_embeddings=flag(choose),
    )


def _long_rope(choose: Choose, pairs: int) -> tuple[minicpm3.LongRope, int]:
    """Factors, and the context that the model is made for: its original one, longer than any prompt that is drawn, or
    several times a very short one."""
    short = tuple(1.0 + index / 4 for index in range(pairs)) if flag(choose) else (1.0,) * pairs
    longer = tuple(2.0 + 2 * index for index in range(pairs)) if choose((True, True, False)) else short
    original, context = choose(((64, 64), (8, 32), (4, 64), (16, 24)))
    return minicpm3.LongRope(short, longer, original), context


def minicpm3_config(choose: Choose, _images: bool) -> minicpm3.Config:
    """Ranks below and above the widths that grow from them; the scales as published, milder, and none."""
    heads = choose((1, 2, 3, 4))
    rope_dim = choose((8, 2, 4, 16))
    scaling, context = _long_rope(choose, rope_dim // 2)
    return minicpm3.Config(
        vocab_size=vocabulary(choose),
        hidden_size=heads * choose([size for size in (8, 12, 16, 32) if heads * size >= 16]),
        intermediate_size=choose((32, 24, 40)),
        num_hidden_layers=layers(choose),
        num_attention_heads=heads,
        q_lora_rank=choose((16, 24)),
        kv_lora_rank=choose((16, 24)),
        qk_nope_head_dim=choose((8, 4, 12)),
        qk_rope_head_dim=rope_dim,
        rope_scaling=scaling,
        max_position_embeddings=context,
        rope_theta=choose((100.0, 10000.0)),
        scale_emb=choose((1.0, 2.0, 12.0)),
        scale_depth=choose((1.4, 1.0)),
        dim_model_base=choose((16, 8, 48)),
        rms_norm_eps=choose((1e-5, 1e-6)),
        attention_bias=flag(choose),
        tie_word_embeddings=flag(choose),
    )


def glm4_moe_lite_config(choose: Choose, _images: bool) -> glm4_moe_lite.Config:
    """Groups or none, of which some or all are open to a token; one layer with experts is left, or the weights would
    not show what they are."""
    count = layers(choose)
    groups = choose((1, 2, 4))
    experts = groups * choose((2, 3, 4) if groups > 1 else (2, 1, 4, 6))
    chosen_groups = choose(range(1, groups + 1))
    return glm4_moe_lite.Config(
        vocab_size=vocabulary(choose),
        hidden_size=choose((32, 24, 48)),
        intermediate_size=choose((32, 40)),
        moe_intermediate_size=choose((16, 8, 24)),
        num_hidden_layers=count,
        num_attention_heads=choose((1, 2, 3, 4)),
        kv_lora_rank=choose((16, 24)),
        qk_nope_head_dim=choose((8, 4, 12)),
        qk_rope_head_dim=choose((8, 2, 4, 16)),
        v_head_dim=choose((8, 4, 12)),
        q_lora_rank=choose((None, 16, 24)),
        rope_theta=choose((100.0, 10000.0, 1000000.0)),
        rope_interleave=choose((True, False)),
        n_routed_experts=experts,
        n_shared_experts=choose((1, 2)),
        num_experts_per_tok=choose(range(1, experts // groups * chosen_groups + 1)),
        n_group=groups,
        topk_group=chosen_groups,
        norm_topk_prob=choose((True, False)),
        routed_scaling_factor=choose((1.0, 1.8)),
        first_k_dense_replace=choose(range(count)),
        rms_norm_eps=choose((1e-5, 1e-6)),
        attention_bias=flag(choose),
        tie_word_embeddings=flag(choose),
    )
