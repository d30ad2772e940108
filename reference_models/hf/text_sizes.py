"""Sizes of the text families that came after the first five; see ``sizes``."""

from collections.abc import Mapping
from typing import Any

from reference_models import cohere2


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
