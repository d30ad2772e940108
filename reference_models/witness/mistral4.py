"""Mistral 4: multi-head latent attention and experts, YaRN, a query scale by absolute position.

Sources: DeepSeek-V2 (arXiv 2405.04434) for the latent attention, YaRN (arXiv 2309.00071), the published config of
Mistral-Small-4. The latent is normed; every head's key and value grow from it; one rotated key serves all heads. The
softmax scale carries the square of YaRN's ``mscale_all_dim`` factor. The query is scaled after the rotation by
``1 + beta ln(1 + floor(position / L0))``, both of its parts.

``cache_form`` says which rows a cache rounds, the latent or the keys and values; without rounding it says nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from reference_models.witness import rotary
from reference_models.witness.parts import Array, Routing, Weights, attend, experts, heads_of, linear, rms_norm, swiglu
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence

INNER_EPS = 1e-6  # of the norms inside the attention: the published code does not pass rms_norm_eps to them


def hidden_states(config: Any, weights: Weights, given: Sequence, rows: Rows, gaps: Gaps) -> Array:
    """``[S, hidden]`` behind the last layer."""
    scaling, position = config.rope_parameters, given.line()
    angles = position[:, None] * rotary.yarn(config.qk_rope_head_dim, scaling)
    steps = np.floor(position / scaling.original_max_position_embeddings)
    stretch = 1 + scaling.llama_4_scaling_beta * np.log(1 + steps)
    rule = Routing(
        config.num_experts_per_tok,
        config.norm_topk_prob,
        config.routed_scaling_factor,
        config.n_group,
        config.topk_group,
    )
    x = weights["model.embed_tokens.weight"][given.tokens]
    for layer in range(config.num_hidden_layers):
        name, visible = f"model.layers.{layer}", given.visible[layer]
        normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
        x = x + _attention(config, weights, f"{name}.self_attn", normed, (angles, stretch), visible, rows, given)
        gaps.attended(visible)
        normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
        if layer < config.first_k_dense_replace:
            x = x + swiglu(normed, weights, f"{name}.mlp")
        else:
            added, between = experts(normed, weights, f"{name}.mlp", rule)
            gaps.chose(between)
            x = x + added
    return x


def _attention(
    config: Any,
    weights: Weights,
    name: str,
    x: Array,
    by_position: tuple[Array, Array],
    visible: Array,
    rows: Rows,
    given: Sequence,
) -> Array:
    angles, stretch = by_position
    scaling, nope = config.rope_parameters, config.qk_nope_head_dim
    amplitude = rotary.yarn_amplitude(scaling)
    adjacent = config.rope_interleave

    if config.q_lora_rank is None:
        query = linear(x, weights, f"{name}.q_proj")
    else:
        low = linear(x, weights, f"{name}.q_a_proj")
        low = rms_norm(low, weights[f"{name}.q_a_layernorm.weight"], INNER_EPS)
        query = linear(low, weights, f"{name}.q_b_proj")
    query = heads_of(query, nope + config.qk_rope_head_dim)
    turned = rotary.turn(query[..., nope:], angles, adjacent, amplitude)
    query = np.concatenate([query[..., :nope], turned], axis=-1) * stretch[:, None]

    both = linear(x, weights, f"{name}.kv_a_proj_with_mqa")
    latent = rms_norm(both[:, : config.kv_lora_rank], weights[f"{name}.kv_a_layernorm.weight"], INNER_EPS)
    shared = rotary.turn(both[None, :, config.kv_lora_rank :], angles, adjacent, amplitude)
    if given.cache_form == "latent":
        latent, shared = rows.stored(latent[None])[0], rows.stored(shared)
    grown = heads_of(linear(latent, weights, f"{name}.kv_b_proj"), nope + config.v_head_dim)
    shared = np.broadcast_to(shared, (len(grown), *shared.shape[1:]))
    keys, values = np.concatenate([grown[..., :nope], shared], axis=-1), grown[..., nope:]
    if given.cache_form == "decompressed":
        keys, values = rows.stored(keys), rows.stored(values)

    scale = query.shape[-1] ** -0.5
    if scaling.mscale_all_dim:
        scale *= rotary.mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return linear(attend(query, keys, values, visible, scale), weights, f"{name}.o_proj")
