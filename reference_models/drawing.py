"""Configurations drawn from all that a family allows, instead of the few that ``TINY`` lists.

``draw_config(family, choose)`` asks ``choose`` for one of some options again and again. Options are listed simplest
first, so that a search which shrinks towards the first option ends in a configuration that a person can read. The
chooser may be Hypothesis (``lambda options: data.draw(st.sampled_from(options))``) or ``random.Random(seed).choice``.

Every configuration is valid by construction and tiny: nothing is drawn and thrown away.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

from reference_models import (
    drawing_text,
    mistral4,
    nemotron_nas,
    qwen2_vision,
    qwen2_vl,
    qwen3_vision,
    qwen3_vl,
    qwen3_vl_moe,
    rope,
)
from reference_models.choosing import MOST_HEADS, MOST_LAYERS
from reference_models.choosing import Choose as Choose
from reference_models.choosing import flag as _flag
from reference_models.choosing import layers as _layers
from reference_models.choosing import vocabulary as _vocabulary
from reference_models.vision import ACTIVATIONS

#: Image token, video token, and two for whatever stands around images: the last ids of the vocabulary.
SPECIAL_TOKENS = 4


def draw_config(family: str, choose: Choose, *, images: bool = False, windows: bool = False) -> Any:
    """A ``Config`` of the family's module; with ``images`` it has a vision tower, with ``windows`` a family that knows
    sliding windows may have them (others may not: they are not part of what every peer can do).

    Raises ValueError for a family that is not one of ours, and for ``images`` of a family without a tower.
    """
    if family not in _DRAWERS:
        raise ValueError(f"no configurations to draw for {family!r}: one of {', '.join(_DRAWERS)}")
    if images and family not in VISION_FAMILIES:
        raise ValueError(f"{family} has no vision tower here: images are drawn for {', '.join(VISION_FAMILIES)}")
    config = _DRAWERS[family](choose, images)
    return replace(config, **_windows(choose, config)) if windows and isinstance(config, qwen2_vl.Config) else config


# Mistral 4


def _yarn(choose: Choose) -> rope.YarnScaling:
    """A context of a few positions, so that the query scale moves within a short prompt."""
    fast, slow = choose(((0.3, 0.05), (32.0, 1.0), (4.0, 1.0)))
    # Equal as published; then unequal; then each of the two absent, which the formulas treat apart.
    mscale, mscale_all_dim = choose(((1.0, 1.0), (0.7, 1.3), (0.0, 1.0), (1.0, 0.0)))
    return rope.YarnScaling(
        factor=choose((4.0, 1.0, 1.5, 128.0)),
        original_max_position_embeddings=choose((8, 4, 16)),
        rope_theta=choose((100.0, 10000.0)),
        beta_fast=fast,
        beta_slow=slow,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        llama_4_scaling_beta=choose((0.1, 0.5, 0.0)),
    )


def _mistral4(choose: Choose, _images: bool) -> mistral4.Config:
    layers = _layers(choose)
    groups = choose((1, 2, 4))
    experts = groups * choose((2, 3, 4) if groups > 1 else (2, 1, 4, 6))
    chosen_groups = choose(range(1, groups + 1))
    return mistral4.Config(
        vocab_size=_vocabulary(choose),
        hidden_size=choose((32, 24, 48)),
        intermediate_size=choose((32, 40)),
        moe_intermediate_size=choose((16, 8, 24)),
        num_hidden_layers=layers,
        num_attention_heads=choose((1, 2, 3, 4)),
        kv_lora_rank=choose((16, 8, 24)),
        qk_nope_head_dim=choose((8, 4, 12)),
        qk_rope_head_dim=choose((8, 2, 4, 16)),
        v_head_dim=choose((8, 4, 12)),
        rope_parameters=_yarn(choose),
        q_lora_rank=choose((None, 8, 16)),
        n_routed_experts=experts,
        n_shared_experts=choose((1, 2)),
        num_experts_per_tok=choose(range(1, experts // groups * chosen_groups + 1)),
        n_group=groups,
        topk_group=chosen_groups,
        norm_topk_prob=choose((True, False)),
        routed_scaling_factor=choose((1.0, 1.5)),
        first_k_dense_replace=choose(range(layers + 1)),
        rope_interleave=choose((True, False)),
        rms_norm_eps=choose((1e-6, 1e-5)),
        attention_bias=_flag(choose),
        tie_word_embeddings=_flag(choose),
    )


# Nemotron-NAS


def _nemotron_nas(choose: Choose, _images: bool) -> nemotron_nas.Config:
    layers = _layers(choose)
    real = choose(range(layers))  # this one has attention, whatever the others get
    heads = choose((2, 1, 4, 6))
    hidden = heads * choose([size for size in (8, 16, 4, 32) if heads * size >= 16])
    groups = [group for group in range(1, heads + 1) if heads % group == 0]
    words: Sequence[dict[str, bool]] = ({}, {"replace_with_linear": True}, {"no_op": True})
    wide = 450 / hidden  # the first multiple of the width's step is 256 for all small sizes; this one makes it 512

    def block(index: int) -> nemotron_nas.BlockConfig:
        replaced = {} if index == real else choose(words)
        attention = nemotron_nas.AttentionBlock(None if replaced else choose(groups), **replaced)
        replaced = choose(words)
        ffn = nemotron_nas.FFNBlock(None if replaced else choose((1.0, wide)), **replaced)
        return nemotron_nas.BlockConfig(attention, ffn)

    def scaling() -> rope.Llama3Scaling:
        return rope.Llama3Scaling(
            factor=choose((4.0, 1.0, 8.0)),
            original_max_position_embeddings=choose((32, 8, 128)),
            high_freq_factor=choose((4.0, 2.0)),
        )

    return nemotron_nas.Config(
        vocab_size=_vocabulary(choose),
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        block_configs=tuple(block(index) for index in range(layers)),
        rope_theta=choose((100.0, 10000.0, 500000.0)),
        rope_scaling=scaling() if _flag(choose) else None,
        rms_norm_eps=choose((1e-5, 1e-6)),
        attention_bias=_flag(choose),
        mlp_bias=_flag(choose),
        tie_word_embeddings=_flag(choose),
    )


# The Qwen families


def mrope_sections(head_dim: int, interleaved: bool) -> list[rope.MRopeScaling]:
    """Every split of a head's pairs that leaves T one and can be interleaved if it must be; the most even first."""
    pairs = head_dim // 2
    splits = [(pairs - h - w, h, w) for h in range(pairs) for w in range(pairs - h)]
    fitting = [(t, h, w) for t, h, w in splits if not interleaved or (3 * h - 2 < pairs and 3 * w - 1 < pairs)]
    ordered = sorted(fitting, key=lambda split: (max(split) - min(split), -split[0]))
    return [rope.MRopeScaling(split, mrope_interleaved=interleaved) for split in ordered]


def _qwen(choose: Choose, *, interleaved: bool, widths: Sequence[int] | None) -> dict[str, Any]:
    """Fields of all three; ``widths`` are those of the model, None where it is heads x head size."""
    kv_heads = choose((1, 2, 3, 4))
    heads = kv_heads * choose([ratio for ratio in (1, 2, 3, 4) if kv_heads * ratio <= MOST_HEADS])
    # A norm over a handful of numbers that happen to be nearly equal enlarges rounding.
    head_dim = choose([size for size in (8, 4, 12, 16) if widths is not None or heads * size >= 16])
    vocabulary = _vocabulary(choose)
    return {
        "vocab_size": vocabulary,
        "hidden_size": heads * head_dim if widths is None else choose(widths),
        "intermediate_size": choose((32, 24, 40)),
        "num_hidden_layers": _layers(choose),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_scaling": choose(mrope_sections(head_dim, interleaved)),
        "rope_theta": choose((100.0, 10000.0, 1000000.0)),
        "rms_norm_eps": choose((1e-6, 1e-5)),
        "tie_word_embeddings": _flag(choose),
        "image_token_id": vocabulary - SPECIAL_TOKENS,
        "video_token_id": vocabulary - SPECIAL_TOKENS + 1,
    } | ({} if widths is None else {"head_dim": head_dim, "attention_bias": _flag(choose)})


def _tower(choose: Choose) -> dict[str, Any]:
    """Fields of both kinds of tower but its width, whose half head must split into pairs."""
    return {
        "depth": choose(range(1, MOST_LAYERS + 1)),
        "num_heads": choose((1, 2, 3)),
        "hidden_act": choose(tuple(ACTIVATIONS)),
        "in_channels": choose((3, 1)),
        "patch_size": choose((2, 1, 3)),
        "spatial_merge_size": choose((2, 1, 3)),
        "temporal_patch_size": choose((2, 1)),
    }


def _tower_width(choose: Choose, heads: int) -> int:
    """At least 16: a LayerNorm over 8 nearly equal numbers enlarges rounding, to 2e-5 of the logits."""
    return heads * choose([size for size in (8, 4, 12, 16) if heads * size >= 16])


def _qwen2_tower(choose: Choose, text: Mapping[str, Any]) -> qwen2_vision.VisionConfig:
    fields = _tower(choose)
    width = _tower_width(choose, fields["num_heads"])
    return qwen2_vision.VisionConfig(
        embed_dim=width, hidden_size=text["hidden_size"], mlp_ratio=choose((2, 1, 4)), **fields
    )


def _qwen3_tower(choose: Choose, text: Mapping[str, Any]) -> qwen3_vision.VisionConfig:
    fields = _tower(choose)
    features = choose(range(min(fields["depth"], text["num_hidden_layers"]) + 1))
    return qwen3_vision.VisionConfig(
        hidden_size=_tower_width(choose, fields["num_heads"]),
        intermediate_size=choose((16, 28)),
        out_hidden_size=text["hidden_size"],
        num_position_embeddings=choose((4, 1, 9, 16, 36)),
        deepstack_visual_indexes=choose(list(permutations(range(fields["depth"]), features))),
        **fields,
    )


_QWEN3_WIDTHS = (32, 20, 24)


def _qwen2_vl(choose: Choose, images: bool) -> qwen2_vl.Config:
    fields = _qwen(choose, interleaved=False, widths=None)
    return qwen2_vl.Config(**fields, vision=_qwen2_tower(choose, fields) if images else None)


def _windows(choose: Choose, config: qwen2_vl.Config) -> dict[str, Any]:
    """Of none, those from some depth on, or any of the layers."""
    how = choose((None, "depth", "types"))
    if how is None:
        return {}
    fields = {"use_sliding_window": True, "sliding_window": choose((4, 3, 2, 1, 8))}
    count = config.num_hidden_layers
    if how == "depth":
        return fields | {"max_window_layers": choose(range(count + 1))}
    kinds: tuple[qwen2_vl.LayerType, ...] = ("sliding_attention", "full_attention")
    return fields | {"layer_types": tuple(choose(kinds) for _ in range(count))}


def _qwen3_vl(choose: Choose, images: bool) -> qwen3_vl.Config:
    fields = _qwen(choose, interleaved=True, widths=_QWEN3_WIDTHS)
    return qwen3_vl.Config(**fields, vision=_qwen3_tower(choose, fields) if images else None)


def _qwen3_vl_moe(choose: Choose, images: bool) -> qwen3_vl_moe.Config:
    fields = _qwen(choose, interleaved=True, widths=_QWEN3_WIDTHS)
    layers = fields["num_hidden_layers"]
    experts = choose((2, 1, 4, 6))
    step = choose(range(1, layers + 1))
    sparse = {index for index in range(layers) if (index + 1) % step == 0}
    # One layer with experts is left: without any the weights are those of qwen3_vl.
    dense = [
        subset for size in range(layers) for subset in combinations(range(layers), size) if not sparse <= set(subset)
    ]
    return qwen3_vl_moe.Config(
        **fields,
        moe_intermediate_size=choose((16, 8, 24)),
        num_experts=experts,
        num_experts_per_tok=choose(range(1, experts + 1)),
        decoder_sparse_step=step,
        mlp_only_layers=choose(dense),
        vision=_qwen3_tower(choose, fields) if images else None,
    )


_DRAWERS: Mapping[str, Callable[[Choose, bool], Any]] = {
    "cohere2": drawing_text.cohere2_config,
    "glm4_moe_lite": drawing_text.glm4_moe_lite_config,
    "minicpm3": drawing_text.minicpm3_config,
    "mistral4": _mistral4,
    "nemotron_nas": _nemotron_nas,
    "olmo3": drawing_text.olmo3_config,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
}
VISION_FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
