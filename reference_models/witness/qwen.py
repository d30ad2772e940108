"""Qwen2-VL, Qwen3-VL and Qwen3-VL-MoE: a decoder with M-RoPE, whose embeddings may be image features.

Sources: Qwen2-VL (arXiv 2409.12191), Qwen3 (arXiv 2505.09388), Qwen3-VL (arXiv 2511.21631) and the published configs.
Qwen2's q, k and v have a bias; Qwen3 norms every head of q and k before the rotation, and its head size is a field of
its own. DeepStack adds features to the output of early layers, at the places of the images.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference_models.witness import rotary
from reference_models.witness.parts import Array, Routing, Weights, attend, experts, heads_of, linear, rms_norm, swiglu
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence


def hidden_states(config: Any, weights: Weights, given: Sequence, rows: Rows, gaps: Gaps) -> Array:
    """``[S, hidden]`` behind the last layer."""
    scaling = config.rope_scaling
    plain = rotary.frequencies(config.head_dim, config.rope_theta)
    angles = rotary.mrope_angles(given.places(), plain, scaling.mrope_section, scaling.mrope_interleaved)
    x = weights["model.embed_tokens.weight"][given.tokens]
    image = np.zeros((len(x), 1), bool) if given.is_feature is None else given.is_feature[:, None]
    if given.features is not None:
        x = np.where(image, given.features, x)
    for layer in range(config.num_hidden_layers):
        name, visible = f"model.layers.{layer}", given.visible[layer]
        normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
        x = x + _attention(config, weights, f"{name}.self_attn", normed, angles, visible, rows)
        gaps.attended(visible)
        normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
        if f"{name}.mlp.gate.weight" in weights:
            added, between = experts(normed, weights, f"{name}.mlp", Routing(config.num_experts_per_tok))
            gaps.chose(between)
        else:
            added = swiglu(normed, weights, f"{name}.mlp")
        x = x + added
        if layer < len(given.deepstack):
            x = x + np.where(image, given.deepstack[layer], 0.0)
    return x


def _attention(config: Any, weights: Weights, name: str, x: Array, angles: Array, visible: Array, rows: Rows) -> Array:
    size = config.head_dim
    q, k, v = (heads_of(linear(x, weights, f"{name}.{part}_proj"), size) for part in "qkv")
    if f"{name}.q_norm.weight" in weights:
        q = rms_norm(q, weights[f"{name}.q_norm.weight"], config.rms_norm_eps)
        k = rms_norm(k, weights[f"{name}.k_norm.weight"], config.rms_norm_eps)
    k, v = rows.stored(rotary.turn(k, angles)), rows.stored(v)
    return linear(attend(rotary.turn(q, angles), k, v, visible, size**-0.5), weights, f"{name}.o_proj")
