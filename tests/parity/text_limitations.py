"""Entries of ``limitations`` for the text families that came after the first five."""

from __future__ import annotations

from tests.parity.conditions import (
    factors_matter,
    layer_types_as_patterns_of_four,
    long_pattern,
    made_for_more,
    own_attention_factor,
    within_original,
)
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
    Limitation(
        id="transformers-longrope-by-length",
        peer="transformers",
        families=("minicpm3",),
        versions=">=5.24",
        kind="known failure",
        condition="the model is made for more than its original context, the prompt is not longer than that",
        holds=lambda case: factors_matter(case) and made_for_more(case) and within_original(case),
        seen=lambda case: len(case.tokens) > 2,  # else hardly a key was turned away from its query
        span=(1e-4, 40.0),
        why="dynamic_rope_update takes the short factors for such a forward and the long ones for a longer one; keys "
        "that a cache holds from before the change then meet queries that turn by the others",
    ),
    Limitation(
        id="mlx-lm-long-factors-alone",
        peer="mlx-lm",
        families=("minicpm3",),
        versions=">=0.32.2",
        kind="known failure",
        condition="the model is made for no more than its original context",
        holds=lambda case: factors_matter(case) and not made_for_more(case),
        seen=lambda case: len(case.tokens) > 2,
        span=(1e-4, 40.0),
        why="SuScaledRoPE takes short_factor and never looks at it; in the published model both are the same",
    ),
    Limitation(
        id="mlx-lm-tied-minicpm3",
        peer="mlx-lm",
        families=("minicpm3",),
        versions=">=0.32.2",
        kind="known failure",
        condition="tie_word_embeddings is set, and dim_model_base is not hidden_size",
        holds=lambda case: case.config.tie_word_embeddings and case.config.dim_model_base != case.config.hidden_size,
        span=(0.1, 99.0),
        why="Model divides by hidden_size / dim_model_base only before a matrix of its own",
    ),
)
