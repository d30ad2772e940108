"""OLMo 3: every part is normed behind itself, q and k as a whole; YaRN turns the layers that see everything alone.

Sources: the published config of Olmo-3-7B and the model of that type in transformers, OLMo 2 (arXiv 2501.00656), YaRN
(arXiv 2309.00071). A layer sees everything if ``layer_types`` says so; without them, if its number, from one, is a
multiple of 4.
"""

from __future__ import annotations

import math
from typing import Any

from reference_models.witness import rotary
from reference_models.witness.parts import Array, Weights, attend, heads_of, linear, rms_norm, swiglu
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence


def hidden_states(config: Any, weights: Weights, given: Sequence, rows: Rows, gaps: Gaps) -> Array:
    """``[S, hidden]`` behind the last layer."""
    size, eps, scaling = config.hidden_size // config.num_attention_heads, config.rms_norm_eps, config.rope_scaling
    position = given.line()[:, None]
    near = position * rotary.frequencies(size, config.rope_theta), 1.0
    far = near if scaling is None else (position * _stretched(size, config.rope_theta, scaling), _amplitude(scaling))
    x = weights["model.embed_tokens.weight"][given.tokens]
    for layer in range(config.num_hidden_layers):
        name, visible = f"model.layers.{layer}", given.visible[layer]
        angles, amplitude = far if _sees_everything(config, layer) else near
        q, k, v = (linear(x, weights, f"{name}.self_attn.{part}_proj") for part in "qkv")
        q = rms_norm(q, weights[f"{name}.self_attn.q_norm.weight"], eps)
        k = rms_norm(k, weights[f"{name}.self_attn.k_norm.weight"], eps)
        q, k = (rotary.turn(heads_of(part, size), angles, amplitude=amplitude) for part in (q, k))
        mixed = attend(q, rows.stored(k), rows.stored(heads_of(v, size)), visible, size**-0.5)
        gaps.attended(visible)
        mixed = linear(mixed, weights, f"{name}.self_attn.o_proj")
        x = x + rms_norm(mixed, weights[f"{name}.post_attention_layernorm.weight"], eps)
        grown = swiglu(x, weights, f"{name}.mlp")
        x = x + rms_norm(grown, weights[f"{name}.post_feedforward_layernorm.weight"], eps)
    return x


def _sees_everything(config: Any, layer: int) -> bool:
    if config.layer_types is not None:
        return bool(config.layer_types[layer] == "full_attention")
    return (layer + 1) % 4 == 0


def _stretched(size: int, theta: float, scaling: Any) -> Array:
    ramp = scaling.beta_fast, scaling.beta_slow
    return rotary.yarn_ramp(size, theta, scaling.factor, scaling.original_max_position_embeddings, ramp)


def _amplitude(scaling: Any) -> float:
    if scaling.attention_factor is not None:
        return float(scaling.attention_factor)
    return 0.1 * math.log(scaling.factor) + 1
