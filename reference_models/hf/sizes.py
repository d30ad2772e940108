"""Configurations that are worth writing to a checkpoint: tiny ones, and ones with the dimensions of published models.

Every width of a tiny one is a multiple of 32, so that it can be quantised (a router's of 64: mlx-lm packs those in
groups of 64), and the vocabulary holds the 256 bytes and the special tokens of ``SPECIAL``. The published ones keep
head counts, head dimensions, widths and RoPE settings; layers (the towers' too), experts and vocabulary are cut,
as noted; ``heads`` keep of them what a cache sees. Patches are 4 pixels wide at least: mlx-vlm takes smaller ones for
channels.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from reference_models import (
    mistral4,
    nemotron_nas,
    qwen2_vision,
    qwen2_vl,
    qwen3_vision,
    qwen3_vl,
    qwen3_vl_moe,
    rope,
)
from reference_models.hf import heads, text_sizes

#: Special tokens behind the 256 bytes, in order of their ids.
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
VOCABULARY = 320


def token_id(text: str) -> int:
    """The id of a special token."""
    return 256 + SPECIAL.index(text)


_TOKENS: dict[str, Any] = {"image_token_id": token_id("<|image_pad|>"), "video_token_id": token_id("<|video_pad|>")}
_TRUNK: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def _attention(group: int) -> nemotron_nas.AttentionBlock:
    return nemotron_nas.AttentionBlock(group)


def _blocks(multiplier: float) -> tuple[nemotron_nas.BlockConfig, ...]:
    """Four layers with every kind of part: no-op attention first, groups of two sizes, linear replacements."""
    none, linear = {"no_op": True}, {"replace_with_linear": True}
    ffn = nemotron_nas.FFNBlock(multiplier)
    return (
        nemotron_nas.BlockConfig(nemotron_nas.AttentionBlock(**none), ffn),
        nemotron_nas.BlockConfig(_attention(2), ffn),
        nemotron_nas.BlockConfig(nemotron_nas.AttentionBlock(**linear), nemotron_nas.FFNBlock(**linear)),
        nemotron_nas.BlockConfig(_attention(4), nemotron_nas.FFNBlock(**none)),
    )


def _mistral4_tiny() -> mistral4.Config:
    return mistral4.Config(
        **_TRUNK,
        intermediate_size=96,
        moe_intermediate_size=32,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        rope_parameters=rope.YarnScaling(factor=4.0, original_max_position_embeddings=8),
    )


def _mistral4_published() -> mistral4.Config:
    """mistralai/Mistral-Small-4-119B-2603: 2 of 36 layers, 8 of 128 experts."""
    return mistral4.Config(
        vocab_size=4096,
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=32,
        kv_lora_rank=256,
        q_lora_rank=1024,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=8,
        num_experts_per_tok=4,
        rope_parameters=rope.YarnScaling(factor=128.0, original_max_position_embeddings=8192),
    )


def _nemotron_tiny() -> nemotron_nas.Config:
    """Without RoPE scaling: transformers 5 loads no tokenizer beside a scaled config that it does not know."""
    return nemotron_nas.Config(**_TRUNK | {"num_hidden_layers": 4}, block_configs=_blocks(1.0))


def _nemotron_published() -> nemotron_nas.Config:
    """nvidia/Llama-3_1-Nemotron-51B-Instruct: heads, widths and RoPE; 4 layers, one of each kind, of its 80."""
    return nemotron_nas.Config(
        vocab_size=4096,
        hidden_size=8192,
        num_hidden_layers=4,
        num_attention_heads=64,
        block_configs=_blocks(1.3125),
        rope_scaling=rope.Llama3Scaling(factor=8.0, original_max_position_embeddings=8192),
    )


def _qwen2_vl_tiny() -> qwen2_vl.Config:
    return qwen2_vl.Config(
        **_TRUNK,
        **_TOKENS,
        intermediate_size=96,
        num_key_value_heads=2,
        rope_scaling=rope.MRopeScaling((2, 3, 3)),
        vision=qwen2_vision.tiny(hidden_size=64),
    )


def _qwen2_vl_published() -> qwen2_vl.Config:
    """Qwen/Qwen2-VL-7B-Instruct: 2 of 28 layers, 2 of 32 in the tower."""
    return qwen2_vl.Config(
        **_TOKENS,
        vision=qwen2_vision.VisionConfig(depth=2, embed_dim=1280, hidden_size=3584, num_heads=16),
        vocab_size=4096,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=2,
        num_attention_heads=28,
        num_key_value_heads=4,
        rope_scaling=rope.MRopeScaling((16, 24, 24)),
    )


def _qwen3_tiny_tower() -> qwen3_vision.VisionConfig:
    return qwen3_vision.tiny(out_hidden_size=64, intermediate_size=64)


def _qwen3_published_tower(hidden: int, intermediate: int, out: int) -> qwen3_vision.VisionConfig:
    return qwen3_vision.VisionConfig(
        depth=2,
        hidden_size=hidden,
        intermediate_size=intermediate,
        out_hidden_size=out,
        num_heads=16,
        deepstack_visual_indexes=(0, 1),
    )


def _qwen3_vl_tiny() -> qwen3_vl.Config:
    return qwen3_vl.Config(
        **_TRUNK,
        **_TOKENS,
        intermediate_size=96,
        num_key_value_heads=2,
        head_dim=32,
        rope_scaling=_interleaved(6, 5, 5),
        vision=_qwen3_tiny_tower(),
    )


def _qwen3_vl_published() -> qwen3_vl.Config:
    """Qwen/Qwen3-VL-4B-Instruct: 2 of 36 layers, 2 of 24 in the tower, DeepStack behind both."""
    return qwen3_vl.Config(
        **_TOKENS,
        vision=_qwen3_published_tower(1024, 4096, 2560),
        vocab_size=4096,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        rope_scaling=_interleaved(24, 20, 20),
        tie_word_embeddings=True,
    )


def _qwen3_vl_moe_tiny() -> qwen3_vl_moe.Config:
    return qwen3_vl_moe.Config(
        **_TRUNK,
        **_TOKENS,
        vision=_qwen3_tiny_tower(),
        intermediate_size=96,
        moe_intermediate_size=96,  # not hidden / 2: a square matrix does not show which of its axes come swapped
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        mlp_only_layers=(1,),
        rope_scaling=_interleaved(6, 5, 5),
    )


def _qwen3_vl_moe_published() -> qwen3_vl_moe.Config:
    """Qwen/Qwen3-VL-30B-A3B-Instruct: 2 of 48 layers, 16 of 128 experts, 2 of 27 layers in the tower with DeepStack."""
    return qwen3_vl_moe.Config(
        **_TOKENS,
        vision=_qwen3_published_tower(1152, 4304, 2048),
        vocab_size=4096,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=16,
        num_experts_per_tok=8,
        rope_scaling=_interleaved(24, 20, 20),
    )


def _interleaved(*sections: int) -> rope.MRopeScaling:
    return rope.MRopeScaling((sections[0], sections[1], sections[2]), mrope_interleaved=True)


_PUBLISHED: Mapping[str, Callable[[], Any]] = {
    "cohere2": text_sizes.cohere2_published,
    "glm4_moe_lite": text_sizes.glm4_moe_lite_published,
    "minicpm3": text_sizes.minicpm3_published,
    "mistral4": _mistral4_published,
    "nemotron_nas": _nemotron_published,
    "olmo3": text_sizes.olmo3_published,
    "qwen2_vl": _qwen2_vl_published,
    "qwen3_vl": _qwen3_vl_published,
    "qwen3_vl_moe": _qwen3_vl_moe_published,
}


def _heads(family: str) -> Any:
    return heads.narrowed(family, _PUBLISHED[family](), VOCABULARY)


SIZES: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    "tiny": {
        "cohere2": lambda: text_sizes.cohere2_tiny(_TRUNK),
        "glm4_moe_lite": lambda: text_sizes.glm4_moe_lite_tiny(_TRUNK),
        "minicpm3": lambda: text_sizes.minicpm3_tiny(_TRUNK),
        "mistral4": _mistral4_tiny,
        "nemotron_nas": _nemotron_tiny,
        "olmo3": lambda: text_sizes.olmo3_tiny(_TRUNK),
        "qwen2_vl": _qwen2_vl_tiny,
        "qwen3_vl": _qwen3_vl_tiny,
        "qwen3_vl_moe": _qwen3_vl_moe_tiny,
    },
    "published": _PUBLISHED,
    "heads": {family: functools.partial(_heads, family) for family in _PUBLISHED},
}
"""Sizes -> family -> what makes the Config."""
