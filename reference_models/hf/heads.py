"""Configurations with the attention of published models behind narrow layers: what a cache holds is of the real shape,
and a prompt of thousands of tokens still takes seconds on a CPU.

Kept from ``sizes``: dimensions of a head, ranks of latent attention, head counts where they are free of the width, how
many query heads share a key, RoPE settings, layers. Cut: widths, vocabulary, experts' widths, windows, the tower.
Where a head is a share of the width (cohere2, nemotron_nas, olmo3, qwen2_vl) there are fewer heads.
"""

import dataclasses
from typing import Any

from reference_models import qwen2_vision, qwen3_vision

#: Tokens: half of the default chunk of a validation, so that windows end within every prompt.
WINDOW = 32

_NARROW = {"hidden_size": 256, "intermediate_size": 192}
_EXPERTS = {**_NARROW, "moe_intermediate_size": 64}
_WINDOWED = {"hidden_size": 1024, "intermediate_size": 192, "num_attention_heads": 8, "sliding_window": WINDOW}

_CUTS: dict[str, dict[str, Any]] = {
    "cohere2": {**_WINDOWED, "num_key_value_heads": 2},
    "glm4_moe_lite": _EXPERTS,
    "minicpm3": {**_NARROW, "hidden_size": 320},  # a multiple of its 40 heads
    "mistral4": _EXPERTS,
    "nemotron_nas": {"hidden_size": 1024, "num_attention_heads": 8},
    "olmo3": {**_WINDOWED, "num_key_value_heads": 8},
    # Qwen/Qwen2-VL-2B-Instruct, whose attention fails with --max-kv-size 1024: 12 query heads of 128, 2 of keys.
    "qwen2_vl": {"hidden_size": 1536, "intermediate_size": 192, "num_attention_heads": 12, "num_key_value_heads": 2},
    "qwen3_vl": _NARROW,
    "qwen3_vl_moe": _EXPERTS,
}


def narrowed(family: str, published: Any, vocabulary: int) -> Any:
    """The Config ``published`` of a family with its attention alone as it was; ``vocabulary``: number of tokens."""
    changes = {**_CUTS[family], "vocab_size": vocabulary}
    width = changes["hidden_size"]
    if isinstance(getattr(published, "vision", None), qwen2_vision.VisionConfig):
        changes["vision"] = qwen2_vision.tiny(hidden_size=width)
    elif isinstance(getattr(published, "vision", None), qwen3_vision.VisionConfig):
        deepstack = published.vision.deepstack_visual_indexes  # a layer of the tower for every layer that takes one
        changes["vision"] = qwen3_vision.tiny(
            out_hidden_size=width, intermediate_size=64, deepstack_visual_indexes=deepstack
        )
    return dataclasses.replace(published, **changes)
