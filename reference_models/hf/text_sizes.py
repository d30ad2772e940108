"""Sizes of the text families that came after the first five; see ``sizes``."""

from collections.abc import Mapping
from typing import Any

from reference_models import cohere2, olmo3
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
