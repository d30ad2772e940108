"""What the processors of transformers and mlx-vlm want to know beside a checkpoint with a vision tower.

Fields and class names are those of the files published with ``Qwen/Qwen2-VL-7B-Instruct`` and
``Qwen/Qwen3-VL-4B-Instruct``; bounds of size follow the tower's patches.
"""

from typing import Any

#: Means and deviations per channel: those of CLIP, or a plain half.
_CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
_HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
#: Family -> stem of its classes' names, and how its pixels are normalised.
_KINDS = {
    "qwen2_vl": ("Qwen2VL", _CLIP),
    "qwen3_vl": ("Qwen3VL", _HALF),
    "qwen3_vl_moe": ("Qwen3VL", _HALF),
}
_FEWEST, _MOST = 4, 1280  # tokens of an image

#: ChatML; an image or a video is its placeholder between two marks, which the processor then repeats.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' or 'video' in part %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def processor_files(family: str, config: Any) -> dict[str, Any]:
    """File name -> content: JSON, or text for the chat template. Empty for a model without a tower, and for one whose
    images have other than three channels, which no processor makes."""
    tower = getattr(config, "vision", None)
    if tower is None or tower.in_channels != 3:
        return {}
    stem, (mean, deviation) = _KINDS[family]
    token = (tower.patch_size * tower.spatial_merge_size) ** 2  # pixels
    common = {
        "processor_class": f"{stem}Processor",
        "patch_size": tower.patch_size,
        "temporal_patch_size": tower.temporal_patch_size,
        "merge_size": tower.spatial_merge_size,
        "image_mean": mean,
        "image_std": deviation,
        "size": {"shortest_edge": _FEWEST * token, "longest_edge": _MOST * token},
    }
    return {
        "preprocessor_config.json": common | {"image_processor_type": "Qwen2VLImageProcessor"},
        "video_preprocessor_config.json": common | {"video_processor_type": f"{stem}VideoProcessor"},
        "chat_template.jinja": CHAT_TEMPLATE,
    }
