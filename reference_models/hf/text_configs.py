"""config.json of the text families that came after the first five; see ``configs``.

Sources: the configs published with ``CohereForAI/c4ai-command-r7b-12-2024``; the configuration classes of transformers
5, whose defaults count for absent fields, since a saved config may leave out whatever is the default.
"""

from collections.abc import Mapping
from typing import Any

from reference_models.hf.fields import Fields, common_fields, rope_fields


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
