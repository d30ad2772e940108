"""Sizes of the text families that came after the first five; see ``sizes``."""

from collections.abc import Mapping
from typing import Any

from reference_models import cohere2, glm4_moe_lite, minicpm3, olmo3
from reference_models.layers import LayerType


def cohere2_tiny(trunk: Mapping[str, Any]) -> cohere2.Config:
    """Two sliding layers, one that sees everything, tied as published."""
    fields = {**trunk, "num_hidden_layers": 3}
    return cohere2.Config(
        **fields, intermediate_size=96, num_key_value_heads=2, sliding_window=4, sliding_window_pattern=3
    )


def cohere2_published() -> cohere2.Config:
    """CohereForAI/c4ai-command-r7b-12-2024: 4 of 32 layers, so that one of them sees everything."""
    return cohere2.Config(
        vocab_size=4096,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        sliding_window=4096,
        sliding_window_pattern=4,
        logit_scale=0.25,
    )


def olmo3_tiny(trunk: Mapping[str, Any]) -> olmo3.Config:
    """A sliding layer, then one that sees everything."""
    kinds: tuple[LayerType, ...] = ("sliding_attention", "full_attention")
    return olmo3.Config(**trunk, intermediate_size=96, num_key_value_heads=2, sliding_window=4, layer_types=kinds)


def olmo3_published() -> olmo3.Config:
    """allenai/Olmo-3-7B-Instruct: 4 of 32 layers, so that one of them sees everything."""
    return olmo3.Config(
        vocab_size=4096,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=32,
        sliding_window=4096,
        rope_scaling=olmo3.YarnScaling(
            factor=8.0, original_max_position_embeddings=8192, attention_factor=1.2079441541679836
        ),
    )


def minicpm3_tiny(trunk: Mapping[str, Any]) -> minicpm3.Config:
    """Made for no more than its original context, and with one list of factors, as published; the scales are milder."""
    slowed = (1.0, 1.1, 1.2, 1.4, 2.0, 3.0, 5.0, 8.0)
    return minicpm3.Config(
        **trunk,
        intermediate_size=96,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        rope_scaling=minicpm3.LongRope(slowed, slowed, 32768),
        scale_emb=2.0,
        dim_model_base=32,
        tie_word_embeddings=False,
    )


def minicpm3_published() -> minicpm3.Config:
    """openbmb/MiniCPM3-4B: 2 of 62 layers; long and short factors are the same there, and so are both contexts."""
    slowed = tuple(1.0 + 16.0 * index / 15 for index in range(16))  # from 1 to 17, as there, evenly
    return minicpm3.Config(
        vocab_size=4096,
        hidden_size=2560,
        intermediate_size=6400,
        num_hidden_layers=2,
        num_attention_heads=40,
        q_lora_rank=768,
        kv_lora_rank=256,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        rope_scaling=minicpm3.LongRope(slowed, slowed, 32768),
    )


def glm4_moe_lite_tiny(trunk: Mapping[str, Any]) -> glm4_moe_lite.Config:
    """A dense layer, then one with experts."""
    return glm4_moe_lite.Config(
        **trunk,
        intermediate_size=96,
        moe_intermediate_size=32,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
    )


def glm4_moe_lite_published() -> glm4_moe_lite.Config:
    """zai-org/GLM-4.7-Flash: 2 of 47 layers, the dense one and one with experts, 16 of 64."""
    return glm4_moe_lite.Config(
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=10240,
        moe_intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=20,
        kv_lora_rank=512,
        q_lora_rank=768,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
        n_routed_experts=16,
    )
