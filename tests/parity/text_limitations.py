"""Entries of ``limitations`` for the text families that came after the first five."""

from __future__ import annotations

from tests.parity.conditions import layer_types_as_patterns_of_four, long_pattern, own_attention_factor
from tests.parity.entry import Limitation

TEXT_LIMITATIONS: tuple[Limitation, ...] = (
    Limitation(
        id="mlx-lm-untied-cohere2",
        peer="mlx-lm",
        families=("cohere2",),
        versions=">=0.32.2",
        kind="limitation",
        condition="tie_word_embeddings is not set",
        holds=lambda case: not case.config.tie_word_embeddings,
        says="parameters not in model:.*lm_head",
        why="Model of cohere2 has no output matrix but the embedding",
    ),
    Limitation(
        id="mlx-lm-long-pattern",
        peer="mlx-lm",
        families=("cohere2",),
        versions=">=0.32.2",
        kind="limitation",
        condition="there are fewer layers than sliding_window_pattern, which is 4 if absent",
        holds=long_pattern,
        says="list index out of range",
        why="CohereModel makes the mask of the layers that see everything from the cache of the first of them, whether "
        "or not there is one",
    ),
    Limitation(
        id="mlx-lm-no-layer-types",
        peer="mlx-lm",
        families=("cohere2",),
        versions=">=0.32.2",
        kind="known failure",
        condition="layer_types names other layers than every fourth",
        holds=layer_types_as_patterns_of_four,
        span=(1e-2, 40.0),
        why="ModelArgs has no layer_types: without sliding_window_pattern every fourth layer sees everything",
    ),
    Limitation(
        id="mlx-lm-one-kind-of-layer",
        peer="mlx-lm",
        families=("olmo3",),
        versions=">=0.32.2",
        kind="limitation",
        condition="all layers have a sliding window, or none has",
        holds=lambda case: len(set(case.config.windows)) == 1,
        says="is not in list",
        why="Olmo3Model looks for the first layer of either kind, which it takes its masks from",
    ),
    Limitation(
        id="mlx-lm-attention-factor",
        peer="mlx-lm",
        families=("olmo3",),
        versions=">=0.32.2",
        kind="known failure",
        condition="attention_factor is another one than 0.1 ln(factor) + 1",
        holds=own_attention_factor,
        span=(1e-3, 40.0),
        why="initialize_rope reads factor and betas of yarn, and no attention_factor",
    ),
)
