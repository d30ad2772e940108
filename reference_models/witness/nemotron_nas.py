"""Nemotron-NAS (DeciLM): in each layer attention and feed-forward are the real thing, one linear map, or absent.

Sources: Puzzle (arXiv 2411.19146) and the published config of the Llama-3_1-Nemotron-51B family.
"""

from __future__ import annotations

from typing import Any

from reference_models.witness import rotary
from reference_models.witness.parts import Array, Weights, attend, heads_of, linear, rms_norm, swiglu
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence


def hidden_states(config: Any, weights: Weights, given: Sequence, rows: Rows, gaps: Gaps) -> Array:
    """``[S, hidden]`` behind the last layer."""
    size, theta, scaling = config.head_dim, config.rope_theta, config.rope_scaling
    plain = rotary.frequencies(size, theta) if scaling is None else rotary.llama3(size, theta, scaling)
    angles = given.line()[:, None] * plain
    x = weights["model.embed_tokens.weight"][given.tokens]
    remaining = iter(given.visible)  # one for each layer that has attention
    for layer, block in enumerate(config.block_configs):
        name = f"model.layers.{layer}"
        if not block.attention.no_op:
            normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
            if block.attention.replace_with_linear:
                x = x + linear(normed, weights, f"{name}.self_attn.linear_attn")
            else:
                visible = next(remaining)
                x = x + _attention(weights, f"{name}.self_attn", normed, size, angles, visible, rows)
                gaps.attended(visible)
        if not block.ffn.no_op:
            normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
            if block.ffn.replace_with_linear:
                x = x + linear(normed, weights, f"{name}.mlp.linear_mlp")
            else:
                x = x + swiglu(normed, weights, f"{name}.mlp")
    return x


def _attention(weights: Weights, name: str, x: Array, size: int, angles: Array, visible: Array, rows: Rows) -> Array:
    """The number of KV heads follows from the width of the key projection."""
    q, k, v = (heads_of(linear(x, weights, f"{name}.{part}_proj"), size) for part in "qkv")
    k, v = rows.stored(rotary.turn(k, angles)), rows.stored(v)
    return linear(attend(rotary.turn(q, angles), k, v, visible, size**-0.5), weights, f"{name}.o_proj")
