"""MiniCPM3: latent attention with LongRoPE; embedding, residuals and logits are scaled.

Sources: the published config of MiniCPM3-4B and the model of that type in transformers, MiniCPM (arXiv 2404.06395) for
the scales, LongRoPE (arXiv 2402.13753). Whether the long or the short factors slow the pairs is settled by the context
that the model is made for, once and for all positions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reference_models.witness import latent, rotary
from reference_models.witness.parts import Array, Weights, product, rms_norm, swiglu
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence


def hidden_states(config: Any, weights: Weights, given: Sequence, rows: Rows, gaps: Gaps) -> Array:
    """``[S, hidden]`` behind the last layer."""
    turn = _turn(config, given.line())
    value_size, eps = config.hidden_size // config.num_attention_heads, config.rms_norm_eps
    share = config.scale_depth / config.num_hidden_layers**0.5
    x = weights["model.embed_tokens.weight"][given.tokens] * config.scale_emb
    for layer in range(config.num_hidden_layers):
        name, visible = f"model.layers.{layer}", given.visible[layer]
        normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        mixed = latent.attention(
            config, value_size, weights, f"{name}.self_attn", normed, turn, visible, rows, given.cache_form
        )
        gaps.attended(visible)
        x = x + share * mixed
        normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        x = x + share * swiglu(normed, weights, f"{name}.mlp")
    return x


def logits(config: Any, weights: Weights, x: Array) -> Array:
    """``[S, vocab]`` of what the last layer gives; the hidden state is divided by hidden size over base size."""
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    normed = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    return product(normed / (config.hidden_size / config.dim_model_base), weights[f"{head}.weight"])


def _turn(config: Any, position: Array) -> latent.Turn:
    scaling, context = config.rope_scaling, config.max_position_embeddings
    stretch = context / scaling.original_max_position_embeddings
    factors = np.array(scaling.long_factor if stretch > 1 else scaling.short_factor)
    plain = rotary.frequencies(config.qk_rope_head_dim, config.rope_theta)
    amplitude = 1.0
    if stretch > 1:
        amplitude = math.sqrt(1 + math.log(stretch, scaling.original_max_position_embeddings))
    return latent.Turn(position[:, None] * (plain / factors), amplitude=amplitude)
