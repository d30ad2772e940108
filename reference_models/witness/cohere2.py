"""Cohere 2: one LayerNorm a layer, attention and feed-forward beside each other; what sees everything never rotates.

Sources: the published config of Command R7B and the model of that type in transformers; LayerNorm (arXiv 1607.06450),
here without its shift. A layer is a sliding one if ``layer_types`` says so, else if its number, from one, is no
multiple of the pattern; those alone know positions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference_models.witness import rotary
from reference_models.witness.parts import Array, Weights, attend, heads_of, linear, product, swiglu
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence


def hidden_states(config: Any, weights: Weights, given: Sequence, rows: Rows, gaps: Gaps) -> Array:
    """``[S, hidden]`` behind the last layer."""
    size = config.hidden_size // config.num_attention_heads
    angles = given.line()[:, None] * rotary.frequencies(size, config.rope_theta)
    x = weights["model.embed_tokens.weight"][given.tokens]
    for layer in range(config.num_hidden_layers):
        name, visible = f"model.layers.{layer}", given.visible[layer]
        normed = layer_norm(x, weights[f"{name}.input_layernorm.weight"], config.layer_norm_eps)
        q, k, v = (heads_of(linear(normed, weights, f"{name}.self_attn.{part}_proj"), size) for part in "qkv")
        if _slides(config, layer):
            q, k = (rotary.turn(part, angles, adjacent=True) for part in (q, k))
        mixed = attend(q, rows.stored(k), rows.stored(v), visible, size**-0.5)
        gaps.attended(visible)
        x = x + linear(mixed, weights, f"{name}.self_attn.o_proj") + swiglu(normed, weights, f"{name}.mlp")
    return x


def logits(config: Any, weights: Weights, x: Array) -> Array:
    """``[S, vocab]`` of what the last layer gives."""
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    normed = layer_norm(x, weights["model.norm.weight"], config.layer_norm_eps)
    return product(normed, weights[f"{head}.weight"]) * config.logit_scale


def layer_norm(x: Array, weight: Array, eps: float) -> Array:
    """``(x - mean) / sqrt(variance + eps) * weight`` over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    return np.asarray(centred / np.sqrt((centred * centred).mean(axis=-1, keepdims=True) + eps) * weight)


def _slides(config: Any, layer: int) -> bool:
    if config.layer_types is not None:
        return bool(config.layer_types[layer] == "sliding_attention")
    return (layer + 1) % (config.sliding_window_pattern or 4) != 0
