"""``vision_config`` of a config.json, and the tokens that stand for images and videos.

Sources: the configs published with ``Qwen/Qwen2-VL-7B-Instruct`` and ``Qwen/Qwen3-VL-4B-Instruct``; the classes of
transformers 5 (``Qwen2VLVisionConfig``, ``Qwen3VLVisionConfig``), whose defaults count for absent fields, since a saved
config may leave out whatever is the default.
"""

from collections.abc import Callable, Mapping
from typing import Any

from reference_models import qwen2_vision, qwen3_vision, vision
from reference_models.hf.fields import ConfigError, Fields

#: ``vision_config.model_type`` of the towers here, by family; absent in the first published files.
_KINDS = {
    "qwen2_vl": ("qwen2_vl", "qwen2_vl_vision"),
    "qwen3_vl": ("qwen3_vl", "qwen3_vl_vision"),
    "qwen3_vl_moe": ("qwen3_vl_moe", "qwen3_vl_moe_vision", "qwen3_vl", "qwen3_vl_vision"),
}
_TOKENS = {"image_token_id": 151655, "video_token_id": 151656}
_MOST_IN_A_BLOCK = 1 << 20  # numbers that a merge block brings to its token; 4,608 in the published ones
#: How else transformers lets a config call a field.
_OTHER_NAMES = {"num_heads": "num_attention_heads", "depth": "num_hidden_layers", "in_channels": "in_chans"}


def vision_part(family: str, outer: Fields, has_vision: bool | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What ``family``'s Config takes of its tower from the whole config ``outer``, and notes for a reader.

    ``has_vision``: whether the weights hold a tower; without it the config's is not read. Empty for a family without
    towers and for a config without ``vision_config``. Raises ConfigError.
    """
    if family not in _KINDS or "vision_config" not in outer:
        return {}, ()
    if has_vision is False:
        return {}, ("vision_config is not used: the weights hold no vision tower, so this is a model of text alone",)
    fields = outer.nested("vision_config")
    if (kind := fields.text("model_type", None)) not in (None, *_KINDS[family]):
        raise ConfigError(f"{fields.title('model_type')} is {kind!r:.60}; {family} has {' or '.join(_KINDS[family])}")
    try:
        tower = _TOWERS[family](fields)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{fields.where}: {error}") from error
    tokens = {name: outer.size(name, default, low=0) for name, default in _TOKENS.items()}
    for name, token in tokens.items():
        outer.refuse(name.replace("_id", "_index"), token, why=f"{name} is {token}")
    return {"vision": tower} | tokens, ()


def _size(fields: Fields, name: str, default: int) -> int:
    """A size under its name or the other one that readers take. ConfigError when both are there and disagree."""
    other = _OTHER_NAMES.get(name, name)
    found = int(fields.size(name, fields.size(other, default)))
    if other in fields and fields.size(other) != found:
        raise ConfigError(f"{fields.title(name)} is {found}, but {fields.title(other)} is {fields.size(other)}")
    return found


def _common(fields: Fields, *, width: int, depth: int, patch_size: int, hidden_act: str) -> dict[str, Any]:
    """Fields of both towers. ``width``: of the tower; the others are defaults."""
    act = fields.text("hidden_act", hidden_act)
    if act not in vision.ACTIVATIONS:
        raise ConfigError(f"{fields.title('hidden_act')} is {act!r:.60}; known are {', '.join(vision.ACTIVATIONS)}")
    common = {
        "depth": _size(fields, "depth", depth),
        "num_heads": _size(fields, "num_heads", 16),
        "hidden_act": act,
        "in_channels": _size(fields, "in_channels", 3),
        "patch_size": _size(fields, "patch_size", patch_size),
        "spatial_merge_size": _size(fields, "spatial_merge_size", 2),
        "temporal_patch_size": _size(fields, "temporal_patch_size", 2),
    }
    block = width * common["spatial_merge_size"] ** 2
    if block > _MOST_IN_A_BLOCK:
        raise ConfigError(
            f"{fields.title('spatial_merge_size')} ({common['spatial_merge_size']}) makes merge blocks of {block:,} "
            f"numbers; at most {_MOST_IN_A_BLOCK:,} are taken seriously"
        )
    patch = common["patch_size"]
    if patch > 1 and patch == common["in_channels"] == common["temporal_patch_size"]:
        raise ConfigError(
            f"{fields.title('patch_size')} is {patch}, as are in_channels and temporal_patch_size: a cube does not "
            "show whether its channels come first (Hugging Face) or last (MLX)"
        )
    fields.refuse("spatial_patch_size", patch, why="patches of another size than patch_size are not modelled")
    fields.refuse("layer_norm_eps", vision.NORM_EPS, why=f"the published towers have {vision.NORM_EPS}")
    for name in ("window_size", "fullatt_block_indexes"):
        fields.refuse(name, why="windows in a vision tower (Qwen2.5-VL) are not modelled")
    rope = fields.nested("rope_parameters")
    rope.refuse("rope_theta", vision.ROPE_THETA, why=f"the towers turn with {vision.ROPE_THETA}")
    rope.refuse("rope_type", "axial", "default", why="the towers turn by row and column (axial)")
    return common


def _qwen2(fields: Fields) -> qwen2_vision.VisionConfig:
    width = _size(fields, "embed_dim", 1280)
    return qwen2_vision.VisionConfig(
        embed_dim=width,
        hidden_size=_size(fields, "hidden_size", 3584),
        mlp_ratio=_size(fields, "mlp_ratio", 4),
        **_common(fields, width=width, depth=32, patch_size=14, hidden_act="quick_gelu"),
    )


def _qwen3(fields: Fields) -> qwen3_vision.VisionConfig:
    width = _size(fields, "hidden_size", 1152)
    return qwen3_vision.VisionConfig(
        hidden_size=width,
        intermediate_size=_size(fields, "intermediate_size", 4304),
        out_hidden_size=_size(fields, "out_hidden_size", 3584),
        num_position_embeddings=_size(fields, "num_position_embeddings", 2304),
        deepstack_visual_indexes=fields.sizes("deepstack_visual_indexes", (8, 16, 24)),
        **_common(fields, width=width, depth=27, patch_size=16, hidden_act="gelu_pytorch_tanh"),
    )


_TOWERS: Mapping[str, Callable[[Fields], Any]] = {"qwen2_vl": _qwen2, "qwen3_vl": _qwen3, "qwen3_vl_moe": _qwen3}
