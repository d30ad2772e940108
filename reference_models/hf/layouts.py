"""Our weights and our Config in the form of a published checkpoint: the inverse of ``names`` and ``configs``.

The config is written in the dialect that transformers 4 and 5, mlx-lm and mlx-vlm read: ``rope_theta`` and
``rope_scaling`` beside the other fields (Mistral 4: ``rope_parameters``, the only form it was published in). Qwen2-VL
is flat, with the old names of its weights, as published; mlx-vlm reads it in no other form.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, get_args

import mlx.core as mx

from reference_models.hf.names import PATCHES
from reference_models.hf.sizes import token_id
from reference_models.quantised import Packing

Layout = Literal["hf", "mlx"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_VISION_FAMILIES = ("qwen2_vl", "qwen3_vl", "qwen3_vl_moe")
#: Whose latent attention mlx-lm holds as two matrices; in the other it keeps the published one.
_ABSORBED = ("glm4_moe_lite", "mistral4")
_EXPERT = re.compile(r"^(.*\.mlp)\.experts\.(gate|up|down)_proj$")
_NEVER_PACKED = re.compile(r"(norm\.weight|\.bias)$|^vision_tower\.")  # as mlx-vlm does unless told otherwise
ROUTER_BITS = 8  # mlx-lm gives the routers of this kind 8 bits, whatever the rest has

ARCHITECTURES = {
    "cohere2": "Cohere2ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "nemotron_nas": "DeciLMForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}
#: Fields that are not written where our Config has none.
_LEFT_OUT = ("layer_types", "sliding_window_pattern")
#: Families that transformers does not have: their Hugging Face names are those of code inside the checkpoint.
ONLY_MLX = ("nemotron_nas",)


def default_layout(family: str) -> Layout:
    """The layout that most loaders read."""
    return "mlx" if family in ONLY_MLX else "hf"


def weights_in(layout: Layout, family: str, config: Any, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Our parameters under the names, and in the shapes, of a layout; lazy."""
    made: dict[str, mx.array] = {}
    for name, array in weights.items():
        if expert := _EXPERT.match(name):
            made |= _expert(layout, family, expert[1], expert[2], weights)
        elif layout == "mlx" and family in _ABSORBED and name.endswith("self_attn.kv_b_proj.weight"):
            made |= _absorbed(name.removesuffix("kv_b_proj.weight"), config, array)
        elif layout == "mlx" and name == PATCHES:
            made[name] = array.transpose(0, 2, 3, 4, 1)  # channels last
        elif layout == "mlx":
            made[re.sub(r"\.(self_attn\.linear|mlp\.linear)_(attn|mlp)\.", r".\1.", name)] = array
        else:
            made[name] = array
    return {_prefixed(layout, family, name): array for name, array in made.items()}


def _prefixed(layout: Layout, family: str, name: str) -> str:
    if family not in _VISION_FAMILIES:
        return name
    tower = name.startswith("visual.")
    if layout == "mlx":
        return name.replace("visual.", "vision_tower.", 1) if tower else f"language_model.{name}"
    if family == "qwen2_vl":
        return name
    return f"model.{name}" if tower else re.sub(r"^model\.", "model.language_model.", name)


def _expert(layout: Layout, family: str, mlp: str, part: str, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    if layout == "mlx":
        return {f"{mlp}.switch_mlp.{part}_proj.weight": weights[f"{mlp}.experts.{part}_proj"]}
    if family == "glm4_moe_lite":  # as published: one linear map for every expert
        matrices = weights[f"{mlp}.experts.{part}_proj"]
        return {f"{mlp}.experts.{index}.{part}_proj.weight": matrices[index] for index in range(matrices.shape[0])}
    swap = family == "qwen3_vl_moe"  # as published
    if part == "down":
        down = weights[f"{mlp}.experts.down_proj"]
        return {f"{mlp}.experts.down_proj": down.swapaxes(-1, -2) if swap else down}
    if part == "up":
        return {}  # comes with the gate
    fused = mx.concatenate([weights[f"{mlp}.experts.{half}_proj"] for half in ("gate", "up")], axis=1)
    return {f"{mlp}.experts.gate_up_proj": fused.swapaxes(-1, -2) if swap else fused}


def _absorbed(stem: str, config: Any, grown: mx.array) -> dict[str, mx.array]:
    per_head = grown.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
    keys, values = mx.split(per_head, [config.qk_nope_head_dim], axis=1)
    return {f"{stem}embed_q.weight": keys.swapaxes(-1, -2), f"{stem}unembed_out.weight": values}


def pack(weights: Mapping[str, mx.array], packing: Packing) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """Weights of the MLX layout, packed where mlx-lm would, and the ``quantization`` of their config.

    What does not divide into groups is left as it is and named as an exception.
    """
    made: dict[str, mx.array] = {}
    said: dict[str, Any] = {"group_size": packing.group_size, "bits": packing.bits, "mode": "affine"}
    for name, array in weights.items():
        stem = name.removesuffix(".weight")
        if _NEVER_PACKED.search(name) or stem == name:
            made[name] = array
            continue
        own = packing
        if array.shape[-1] % packing.group_size:
            made[name], said[stem] = array, False
            continue
        if f"{stem}.e_score_correction_bias" in weights:  # mlx-lm packs no router of this kind
            made[name] = array
            continue
        if stem.endswith("mlp.gate"):
            own = Packing(ROUTER_BITS, packing.group_size)
            said[stem] = {"group_size": own.group_size, "bits": own.bits}
        packed = mx.quantize(mx.contiguous(array), group_size=own.group_size, bits=own.bits)
        made |= zip((name, f"{stem}.scales", f"{stem}.biases"), packed, strict=True)
    return made, said


def config_to_json(family: str, config: Any, dtype: str) -> dict[str, Any]:
    """The config.json of a checkpoint. ``dtype``: of its unpacked weights."""
    text: dict[str, Any] = {
        key: list(value) if isinstance(value, tuple) else value for key, value in asdict(config).items()
    }
    tower = {name: text.pop(name, None) for name in ("vision", "image_token_id", "video_token_id")}
    if not text.get("use_sliding_window", True):  # the rest says nothing then
        for name in ("sliding_window", "max_window_layers", "layer_types"):
            del text[name]
    if family not in _VISION_FAMILIES:  # an absent field is a default, a null is no value to some readers
        text = {name: value for name, value in text.items() if value is not None or name not in _LEFT_OUT}
    text["hidden_act"] = "silu"
    ends: dict[str, Any] = {
        "bos_token_id": token_id("<|endoftext|>"),
        "eos_token_id": token_id("<|im_end|>"),
        "pad_token_id": token_id("<|endoftext|>"),
    }
    text |= ends | {"max_position_embeddings": 32768}
    whole: dict[str, Any] = {"architectures": [ARCHITECTURES[family]], "torch_dtype": dtype}
    if family not in _VISION_FAMILIES:
        return whole | text | _own_fields(family, config)
    scaling = text["rope_scaling"]
    sections = list(scaling["mrope_section"])
    whole |= {"tie_word_embeddings": config.tie_word_embeddings} | _tower(family, config, tower)
    if family == "qwen2_vl":
        return whole | text | {"model_type": family, "rope_scaling": {"type": "mrope", "mrope_section": sections}}
    text["rope_scaling"] = {"rope_type": "default", "mrope_section": sections, "mrope_interleaved": True}
    text |= {"model_type": f"{family}_text", "dtype": dtype} | _own_fields(family, config)
    return whole | {"model_type": family, "text_config": text}


def _tower(family: str, config: Any, tower: dict[str, Any]) -> dict[str, Any]:
    """``vision_config``, as readers want one even for a model of text alone, and the tokens beside it."""
    fields = tower["vision"] or _small_tower(family, config)
    said = {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    said["model_type"] = family
    if family == "qwen2_vl":
        said |= {"in_chans": said["in_channels"], "spatial_patch_size": said["patch_size"]}
    tokens = {name: tower[name] for name in ("image_token_id", "video_token_id")}
    if tower["vision"] is None:
        tokens = {"image_token_id": token_id("<|image_pad|>"), "video_token_id": token_id("<|video_pad|>")}
    return tokens | {
        "vision_config": said,
        "vision_start_token_id": token_id("<|vision_start|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
    }


def _own_fields(family: str, config: Any) -> dict[str, Any]:
    """What published readers ask for and our Config leaves out."""
    if family == "cohere2":
        return {"model_type": family, "head_dim": config.head_dim}
    if family == "mistral4":
        return {
            "model_type": "mistral4",
            "num_key_value_heads": config.num_attention_heads,
            "qk_head_dim": config.qk_head_dim,
        }
    if family == "glm4_moe_lite":
        dense = config.first_k_dense_replace
        return {
            "model_type": family,
            "num_key_value_heads": config.num_attention_heads,
            "mlp_layer_types": ["dense"] * dense + ["sparse"] * (config.num_hidden_layers - dense),
        }
    if family == "minicpm3":
        scaling = config.rope_scaling
        return {
            "model_type": family,
            "num_key_value_heads": config.num_attention_heads,
            "max_position_embeddings": config.max_position_embeddings,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": list(scaling.short_factor),
                "long_factor": list(scaling.long_factor),
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            },
        }
    if family == "olmo3":
        return {"model_type": family} | _turnings(config)
    if family == "nemotron_nas":
        return {"model_type": "nemotron-nas"}
    if family == "qwen3_vl_moe":
        return {"norm_topk_prob": True}
    return {}


def _turnings(config: Any) -> dict[str, Any]:
    """RoPE of OLMo 3 as published, and in the words of transformers 5, which takes the published ``rope_theta`` for the
    layers that see everything alone (tests/checkpoints/test_transformers_saves.py)."""
    theta, scaling = {"rope_theta": config.rope_theta}, config.rope_scaling
    full: dict[str, Any] = {"rope_type": "default"}
    if scaling is not None:
        full = {"rope_type": "yarn"} | {name: said for name, said in asdict(scaling).items() if said is not None}
    kinds = {"full_attention": full | theta, "sliding_attention": {"rope_type": "default"} | theta}
    return {"rope_scaling": None if scaling is None else full, "rope_parameters": kinds}


def _small_tower(family: str, config: Any) -> dict[str, Any]:
    """A tower that costs a reader nothing, for a model that has none."""
    common: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4, "in_channels": 3}
    if family == "qwen2_vl":
        return common | {"embed_dim": 16, "hidden_size": config.hidden_size}
    own = {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": config.hidden_size}
    return common | own | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
