"""config.json of the text families that came after the first five; see ``configs``.

Sources: the configs published with ``CohereForAI/c4ai-command-r7b-12-2024``, ``allenai/Olmo-3-7B-Instruct``,
``openbmb/MiniCPM3-4B`` and ``zai-org/GLM-4.7-Flash``; the configuration classes of transformers 5, whose defaults count
for absent fields, since a saved config may leave out whatever is the default.
"""

from collections.abc import Mapping
from typing import Any

from reference_models import minicpm3 as minicpm3_model
from reference_models import olmo3 as olmo3_model
from reference_models.hf.fields import ConfigError, Fields, common_fields, context_size, rope_fields


def cohere2(text: Fields) -> dict[str, Any]:
    """Config arguments. The pattern is a number in the published files, ``layer_types`` in those of transformers 5."""
    for name, harmless in _COHERE2_AS_PUBLISHED.items():
        text.refuse(name, harmless, why="the published models differ, and only they are modelled")
    settings = rope_fields(text)
    settings.refuse("rope_type", "default", why="RoPE is not scaled in the published models")
    heads = text.size("num_attention_heads")
    text.refuse("head_dim", text.size("hidden_size") // heads, why="it is hidden_size / num_attention_heads here")
    return common_fields(text) | {
        "intermediate_size": text.size("intermediate_size"),
        "num_key_value_heads": text.size("num_key_value_heads", heads),
        "sliding_window": text.size("sliding_window", 4096),
        "sliding_window_pattern": text.size("sliding_window_pattern", text.size("_sliding_window_pattern", None)),
        "layer_types": text.names("layer_types"),
        "rope_theta": settings.number("rope_theta", 10000.0),
        "layer_norm_eps": text.number("layer_norm_eps", 1e-5),
        "logit_scale": text.number("logit_scale", 0.0625),
    }


_COHERE2_AS_PUBLISHED: Mapping[str, object] = {
    "attention_bias": False,
    "layer_norm_bias": False,
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "position_embedding_type": "rope_gptj",
    "rotary_pct": 1.0,
}


def olmo3(text: Fields) -> dict[str, Any]:
    """Config arguments. Published: one theta, and a scaling meant for the layers that see everything; transformers 5
    writes the settings of either kind of layer on their own."""
    kinds = text.nested("rope_parameters")
    merged, sliding = text, Fields({})
    if "full_attention" in kinds or "sliding_attention" in kinds:
        sliding = kinds.nested("sliding_attention")
        sliding.refuse("rope_type", "default", why="only layers that see everything are stretched")
        merged = Fields({**text.data, "rope_parameters": kinds.nested("full_attention").data}, text.where)
    settings = rope_fields(merged)
    theta = settings.number("rope_theta", 500000.0)
    sliding.refuse("rope_theta", theta, why=f"the layers that see everything have {theta:g}, and there is one for all")
    heads = text.size("num_attention_heads")
    text.refuse("head_dim", text.size("hidden_size") // heads, why="it is hidden_size / num_attention_heads here")
    return common_fields(text) | {
        "intermediate_size": text.size("intermediate_size"),
        "num_key_value_heads": text.size("num_key_value_heads", heads),
        "sliding_window": text.size("sliding_window", 4096),
        "layer_types": text.names("layer_types"),
        "rope_theta": theta,
        "rope_scaling": _olmo3_yarn(settings),
        "rms_norm_eps": text.number("rms_norm_eps", 1e-5),
        "attention_bias": text.flag("attention_bias", False),
    }


def _olmo3_yarn(settings: Fields) -> olmo3_model.YarnScaling | None:
    settings.refuse("rope_type", "default", "yarn", why="this family turns plainly or by yarn")
    if settings.text("rope_type") == "default":
        return None
    for name in ("mscale", "mscale_all_dim"):
        settings.refuse(name, why="attention_factor says it in this family")
    settings.refuse("truncate", True, why="the ramp starts and ends at whole pairs here")
    try:
        return olmo3_model.YarnScaling(
            factor=settings.number("factor"),
            original_max_position_embeddings=context_size(settings),
            beta_fast=settings.number("beta_fast", 32.0),
            beta_slow=settings.number("beta_slow", 1.0),
            attention_factor=settings.number("attention_factor", None),
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{settings.where}: {error}") from error


def minicpm3(text: Fields) -> dict[str, Any]:
    """Config arguments."""
    heads, hidden = text.size("num_attention_heads"), text.size("hidden_size")
    text.refuse("v_head_dim", hidden // heads, why="it is hidden_size / num_attention_heads in the published models")
    text.refuse("num_key_value_heads", heads, why="latent attention has a key for every query head")
    text.refuse("mlp_bias", False, why="no published model of this family has one")
    settings = rope_fields(text)
    scaling, context = _long_rope(settings), text.size("max_position_embeddings", 32768)
    stretch = context / scaling.original_max_position_embeddings
    settings.refuse("factor", stretch, why=f"max_position_embeddings / original_max_position_embeddings is {stretch:g}")
    settings.refuse("attention_factor", why="it follows from the two contexts in this family")
    return common_fields(text) | {
        "intermediate_size": text.size("intermediate_size"),
        "q_lora_rank": text.size("q_lora_rank"),
        "kv_lora_rank": text.size("kv_lora_rank"),
        "qk_nope_head_dim": text.size("qk_nope_head_dim"),
        "qk_rope_head_dim": text.size("qk_rope_head_dim"),
        "rope_scaling": scaling,
        "max_position_embeddings": context,
        "rope_theta": settings.number("rope_theta", 10000.0),
        "scale_emb": text.number("scale_emb", 12.0),
        "scale_depth": text.number("scale_depth", 1.4),
        "dim_model_base": text.size("dim_model_base", 256),
        "rms_norm_eps": text.number("rms_norm_eps", 1e-5),
        "attention_bias": text.flag("attention_bias", False),
    }


def _long_rope(settings: Fields) -> minicpm3_model.LongRope:
    settings.refuse("rope_type", "longrope", why="this family turns by longrope")
    try:
        return minicpm3_model.LongRope(
            short_factor=settings.numbers("short_factor"),
            long_factor=settings.numbers("long_factor"),
            original_max_position_embeddings=context_size(settings),
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{settings.where}: {error}") from error


def glm4_moe_lite(text: Fields) -> dict[str, Any]:
    """Config arguments. The published files count the dense layers, transformers 5 names the kind of every one."""
    text.refuse("topk_method", "noaux_tc", why="experts are chosen by score plus correction bias in this family")
    text.refuse("scoring_func", "sigmoid", why="scores are sigmoids in this family")
    text.refuse("moe_layer_freq", 1, why="every layer behind the dense ones has experts")
    text.refuse("partial_rotary_factor", 1.0, why="all of qk_rope_head_dim rotates")
    settings = rope_fields(text)
    settings.refuse("rope_type", "default", why="RoPE is not scaled in the published models")
    settings.refuse("partial_rotary_factor", 1.0, why="all of qk_rope_head_dim rotates")
    text.refuse("num_key_value_heads", text.size("num_attention_heads"), why="there is a key for every query head")
    return common_fields(text) | {
        "intermediate_size": text.size("intermediate_size"),
        "moe_intermediate_size": text.size("moe_intermediate_size"),
        "kv_lora_rank": text.size("kv_lora_rank"),
        "q_lora_rank": text.size("q_lora_rank", None),
        "qk_nope_head_dim": text.size("qk_nope_head_dim"),
        "qk_rope_head_dim": text.size("qk_rope_head_dim"),
        "v_head_dim": text.size("v_head_dim"),
        "rope_theta": settings.number("rope_theta", 10000.0),
        "rope_interleave": text.flag("rope_interleave", True),
        "n_routed_experts": text.size("n_routed_experts", text.size("num_local_experts", 64)),
        "n_shared_experts": text.size("n_shared_experts", 1),
        "num_experts_per_tok": text.size("num_experts_per_tok", 4),
        "n_group": text.size("n_group", 1),
        "topk_group": text.size("topk_group", 1),
        "norm_topk_prob": text.flag("norm_topk_prob", True),
        "routed_scaling_factor": text.number("routed_scaling_factor", 1.8),
        "first_k_dense_replace": _dense_layers(text),
        "rms_norm_eps": text.number("rms_norm_eps", 1e-5),
        "attention_bias": text.flag("attention_bias", False),
    }


def _dense_layers(text: Fields) -> int:
    """How many layers, all of them first, have no experts. ConfigError where the two ways to say it disagree."""
    kinds = text.names("mlp_layer_types")
    if kinds is None:
        return int(text.size("first_k_dense_replace", 1, low=0))
    dense, count = sum(kind == "dense" for kind in kinds), text.size("num_hidden_layers")
    if kinds != ("dense",) * dense + ("sparse",) * (count - dense):
        raise ConfigError(
            f"{text.title('mlp_layer_types')} must name dense layers, then sparse ones, {count} in all, not "
            f"{list(kinds)!r:.60}"
        )
    text.refuse("first_k_dense_replace", dense, why=f"mlp_layer_types names {dense} dense layers")
    return dense
