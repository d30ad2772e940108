"""GLM-4 MoE Lite: latent attention with plain RoPE; experts by a sigmoid, chosen with a correction that does not weigh.

Sources: the published config of GLM-4.7-Flash and the model of that type in transformers; DeepSeek-V2 (arXiv
2405.04434) for the attention, DeepSeek-V3 (arXiv 2412.19437) for the routing.
"""

from __future__ import annotations

from typing import Any

from reference_models.witness import latent, rotary
from reference_models.witness.parts import Array, Routing, Weights, experts, rms_norm, swiglu
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence


def hidden_states(config: Any, weights: Weights, given: Sequence, rows: Rows, gaps: Gaps) -> Array:
    """``[S, hidden]`` behind the last layer."""
    angles = given.line()[:, None] * rotary.frequencies(config.qk_rope_head_dim, config.rope_theta)
    turn, eps = latent.Turn(angles, adjacent=config.rope_interleave), config.rms_norm_eps
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
        normed = rms_norm(x, weights[f"{name}.input_layernorm.weight"], eps)
        x = x + latent.attention(
            config, config.v_head_dim, weights, f"{name}.self_attn", normed, turn, visible, rows, given.cache_form
        )
        gaps.attended(visible)
        normed = rms_norm(x, weights[f"{name}.post_attention_layernorm.weight"], eps)
        if layer < config.first_k_dense_replace:
            x = x + swiglu(normed, weights, f"{name}.mlp")
        else:
            added, between = experts(normed, weights, f"{name}.mlp", rule)
            gaps.chose(between)
            x = x + added
    return x
