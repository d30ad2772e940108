"""A config.json as the Config of one of our families.

Sources: the configs published with the checkpoints that the family modules name, and the configuration classes of
transformers 4.57 and 5. What a config asks for and a model here does not do is refused, never skipped: a wrong model
that runs is worse than none.
"""

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from reference_models import (
    cohere2,
    glm4_moe_lite,
    minicpm3,
    mistral4,
    nemotron_nas,
    olmo3,
    qwen2_vl,
    qwen3_vl,
    qwen3_vl_moe,
    rope,
)
from reference_models.hf import text_configs
from reference_models.hf.fields import ConfigError, Fields, rope_fields
from reference_models.hf.fields import common_fields as _common
from reference_models.hf.fields import context_size as _context
from reference_models.hf.vision_configs import vision_part

#: ``model_type`` (of the file, or of its ``text_config``) -> family.
MODEL_TYPES: Mapping[str, str] = {
    "cohere2": "cohere2",
    "glm4_moe_lite": "glm4_moe_lite",
    "minicpm3": "minicpm3",
    "mistral4": "mistral4",
    "nemotron-nas": "nemotron_nas",
    "nemotron_nas": "nemotron_nas",
    "deci": "nemotron_nas",
    "olmo3": "olmo3",
    "qwen2_vl": "qwen2_vl",
    "qwen2_vl_text": "qwen2_vl",
    "qwen3_vl": "qwen3_vl",
    "qwen3_vl_text": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl_moe",
    "qwen3_vl_moe_text": "qwen3_vl_moe",
}
WRAPPERS = ("mistral3",)  # image models around a text model of another type, which ``text_config`` names


def config_from_json(
    data: object, has_lm_head: bool | None = None, has_vision: bool | None = None
) -> tuple[str, Any, tuple[str, ...]]:
    """Family, its Config and notes for a reader.

    ``has_lm_head``: whether the weights have an output matrix of their own; decides where the config does not say
    whether it is tied. ``has_vision``: whether they have a vision tower; False makes a Config of text alone. Raises
    ConfigError with one line that names the field.
    """
    if not isinstance(data, Mapping):
        raise ConfigError("must hold a JSON object")
    outer = Fields(data)
    family, text = _text_part(outer)
    notes: list[str] = []
    if "auto_map" in outer:
        notes.append("auto_map asks for code from the checkpoint: it is never executed; our model is used")
    arguments = _PARSERS[family](text)
    tower, said_of_it = vision_part(family, outer, has_vision)
    arguments |= tower
    notes += said_of_it
    if outer.data is not text.data and "tie_word_embeddings" in outer and family in _TIED_OUTSIDE:
        tied = outer.flag("tie_word_embeddings", False)
    elif "tie_word_embeddings" in text:
        tied = text.flag("tie_word_embeddings", False)
    else:
        tied = has_lm_head is False or (has_lm_head is None and family in _TIED_BY_DEFAULT)
        said = "the weights" if has_lm_head is not None else "the family's default"
        notes.append(f"tie_word_embeddings is absent; {said} decide: {'tied' if tied else 'not tied'}")
    module = _MODULES[family]
    try:
        return family, module.Config(**arguments, tie_word_embeddings=tied), tuple(notes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


#: Whose classes in transformers tie the output unless told otherwise.
_TIED_BY_DEFAULT = ("cohere2", "minicpm3")
#: In these the whole model's field says whether its output is tied; its text part keeps a default of its own.
_TIED_OUTSIDE = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")


def _text_part(outer: Fields) -> tuple[str, Fields]:
    """Family and the object that holds the text model's fields."""
    kind = outer.text("model_type")
    inner = outer.nested("text_config")
    text = inner if inner.data else outer
    if kind in WRAPPERS:
        if "model_type" not in inner:
            raise ConfigError(f"model_type is {kind!r}, which needs text_config.model_type to say which text model")
        kind = inner.text("model_type")
        if kind not in MODEL_TYPES:
            raise ConfigError(_unknown(kind, "text_config.model_type"))
    if kind not in MODEL_TYPES:
        raise ConfigError(_unknown(kind, "model_type"))
    family = MODEL_TYPES[kind]
    if "model_type" in inner and MODEL_TYPES.get(inner.text("model_type")) != family:
        raise ConfigError(
            f"model_type is {outer.text('model_type')!r}, but text_config.model_type is {inner.text('model_type')!r}"
        )
    return family, text


def _unknown(kind: str, title: str) -> str:
    known = sorted({*MODEL_TYPES, *WRAPPERS})
    near = difflib.get_close_matches(kind, known, n=3, cutoff=0.5) or sorted(set(MODEL_TYPES.values()))
    return f"{title}: unknown model type {kind!r:.60}; nearest known: {', '.join(near)}"


def _mistral4(text: Fields) -> dict[str, Any]:
    settings = rope_fields(text)
    settings.refuse("rope_type", "yarn", why="this family turns by yarn")
    defaults = {"factor": ..., "rope_theta": 10000.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
    defaults |= {"mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
    try:
        yarn = rope.YarnScaling(
            original_max_position_embeddings=_context(settings),
            **{name: settings.number(name, default) for name, default in defaults.items()},
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{settings.where}: {error}") from error
    return _common(text) | {
        "intermediate_size": text.size("intermediate_size"),
        "moe_intermediate_size": text.size("moe_intermediate_size"),
        "kv_lora_rank": text.size("kv_lora_rank"),
        "q_lora_rank": text.size("q_lora_rank", None),
        "qk_nope_head_dim": text.size("qk_nope_head_dim"),
        "qk_rope_head_dim": text.size("qk_rope_head_dim"),
        "v_head_dim": text.size("v_head_dim"),
        "rope_parameters": yarn,
        "n_routed_experts": text.size("n_routed_experts", text.size("num_local_experts", 128)),
        "n_shared_experts": text.size("n_shared_experts", 1),
        "num_experts_per_tok": text.size("num_experts_per_tok", 4),
        "n_group": text.size("n_group", 1),
        "topk_group": text.size("topk_group", 1),
        "norm_topk_prob": text.flag("norm_topk_prob", True),
        "routed_scaling_factor": text.number("routed_scaling_factor", 1.0),
        "first_k_dense_replace": text.size("first_k_dense_replace", 0, low=0),
        "rope_interleave": text.flag("rope_interleave", True),
        "rms_norm_eps": text.number("rms_norm_eps", 1e-6),
        "attention_bias": text.flag("attention_bias", False),
    }


def _nemotron_nas(text: Fields) -> dict[str, Any]:
    settings = rope_fields(text)
    settings.refuse("rope_type", "default", "llama3", why="only llama3 scaling is modelled")
    scaling = None
    if settings.text("rope_type") == "llama3":
        try:
            scaling = rope.Llama3Scaling(
                factor=settings.number("factor"),
                original_max_position_embeddings=_context(settings),
                low_freq_factor=settings.number("low_freq_factor", 1.0),
                high_freq_factor=settings.number("high_freq_factor", 4.0),
            )
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{settings.where}: {error}") from error
    blocks = text.value("block_configs")
    if not isinstance(blocks, list) or not all(isinstance(block, Mapping) for block in blocks):
        raise ConfigError("block_configs must be a list of objects")
    return _common(text) | {
        "block_configs": tuple(_block(Fields(block, f"block_configs[{i}]")) for i, block in enumerate(blocks)),
        "rope_theta": settings.number("rope_theta", 500000.0),
        "rope_scaling": scaling,
        "rms_norm_eps": text.number("rms_norm_eps", 1e-5),
        "attention_bias": text.flag("attention_bias", False),
        "mlp_bias": text.flag("mlp_bias", False),
    }


def _block(block: Fields) -> nemotron_nas.BlockConfig:
    attention, ffn = block.nested("attention"), block.nested("ffn")
    for name in ("window_length", "num_sink_tokens", "unshifted_sink", "use_prefill_window_in_sink_attention"):
        attention.refuse(name, False, why="windows and sinks inside a layer are not modelled")
    for part in (attention, ffn):
        part.refuse("sparsify", [], why="sparsified layers are not modelled")
    words = [{name: part.flag(name, False) for name in ("no_op", "replace_with_linear")} for part in (attention, ffn)]
    # The published reader ignores the sizes of a part that is absent or linear.
    group = None if any(words[0].values()) else attention.size("n_heads_in_group")
    mult = None if any(words[1].values()) else ffn.number("ffn_mult", high=1 << 10)
    try:
        return nemotron_nas.BlockConfig(
            nemotron_nas.AttentionBlock(group, **words[0]), nemotron_nas.FFNBlock(mult, **words[1])
        )
    except ValueError as error:
        raise ConfigError(f"{block.where}: {error}") from error


def _qwen(text: Fields, theta: float, interleaved: bool) -> dict[str, Any]:
    settings = rope_fields(text)
    settings.refuse("rope_type", "default", "mrope", why="M-RoPE is not scaled in the published models")
    sections = settings.sizes("mrope_section", ())
    if len(sections) != 3:
        raise ConfigError(f"{settings.title('mrope_section')} must be three counts, not {list(sections)}")
    if settings.flag("mrope_interleaved", interleaved) is not interleaved:
        raise ConfigError(f"{settings.title('mrope_interleaved')} must be {interleaved} in this family")
    try:
        scaling = rope.MRopeScaling((sections[0], sections[1], sections[2]), mrope_interleaved=interleaved)
    except ValueError as error:
        raise ConfigError(f"{settings.where}: {error}") from error
    heads = text.size("num_attention_heads")
    return _common(text) | {
        "intermediate_size": text.size("intermediate_size"),
        "num_key_value_heads": text.size("num_key_value_heads", heads),
        "rope_scaling": scaling,
        "rope_theta": settings.number("rope_theta", theta),
        "rms_norm_eps": text.number("rms_norm_eps", 1e-6),
    }


def _qwen2_vl(text: Fields) -> dict[str, Any]:
    return _qwen(text, 1000000.0, interleaved=False) | _windows(text)


def _windows(text: Fields) -> dict[str, Any]:
    """Sliding windows with the defaults of transformers, whose files leave them out; a written null is no window."""
    on = text.flag("use_sliding_window", False)
    kinds = text.names("layer_types")
    window = text.size("sliding_window", None if "sliding_window" in text.data or not on else 4096)
    return {
        "use_sliding_window": on,
        "sliding_window": window,
        "max_window_layers": text.size("max_window_layers", 80 if on else None, low=0),
        "layer_types": kinds,
    }


def _qwen3(text: Fields) -> dict[str, Any]:
    heads, hidden = text.size("num_attention_heads"), text.size("hidden_size")
    text.refuse("use_sliding_window", False, why="no published code of this family has sliding windows")
    return _qwen(text, 5000000.0, interleaved=True) | {
        "head_dim": text.size("head_dim", hidden // heads),
        "attention_bias": text.flag("attention_bias", False),
    }


def _qwen3_vl_moe(text: Fields) -> dict[str, Any]:
    text.refuse("norm_topk_prob", True, why="the published code always renormalises the chosen experts' weights")
    return _qwen3(text) | {
        "moe_intermediate_size": text.size("moe_intermediate_size"),
        "num_experts": text.size("num_experts", None) or text.size("num_local_experts"),
        "num_experts_per_tok": text.size("num_experts_per_tok"),
        "decoder_sparse_step": text.size("decoder_sparse_step", 1),
        "mlp_only_layers": text.sizes("mlp_only_layers"),
    }


_MODULES: Mapping[str, Any] = {
    "cohere2": cohere2,
    "glm4_moe_lite": glm4_moe_lite,
    "minicpm3": minicpm3,
    "mistral4": mistral4,
    "nemotron_nas": nemotron_nas,
    "olmo3": olmo3,
    "qwen2_vl": qwen2_vl,
    "qwen3_vl": qwen3_vl,
    "qwen3_vl_moe": qwen3_vl_moe,
}
_PARSERS: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "cohere2": text_configs.cohere2,
    "glm4_moe_lite": text_configs.glm4_moe_lite,
    "minicpm3": text_configs.minicpm3,
    "mistral4": _mistral4,
    "nemotron_nas": _nemotron_nas,
    "olmo3": text_configs.olmo3,
    "qwen2_vl": _qwen2_vl,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3_vl_moe,
}
