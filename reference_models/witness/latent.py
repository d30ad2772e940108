"""Latent attention in float64, for the families that have nothing more to it than DeepSeek-V2 (arXiv 2405.04434).

The latent is normed; every head's key and value grow from it; one rotated key serves all heads. ``form`` says which
rows a cache rounds: the latent and the shared key, or the keys and values of every head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reference_models.witness import rotary
from reference_models.witness.parts import Array, Weights, attend, heads_of, linear, rms_norm
from reference_models.witness.rows import Rows

INNER_EPS = 1e-6  # of the norms inside the attention, which the models in transformers give no other number


@dataclass(frozen=True)
class Turn:
    """``angles [S, rope / 2]``; ``adjacent``: are neighbours the pairs? ``amplitude``: on what was turned."""

    angles: Array
    adjacent: bool = False
    amplitude: float = 1.0

    def __call__(self, x: Array) -> Array:
        return rotary.turn(x, self.angles, self.adjacent, self.amplitude)


def attention(
    config: Any,
    value_size: int,
    weights: Weights,
    name: str,
    x: Array,
    turn: Turn,
    visible: Array,
    rows: Rows,
    form: str,
) -> Array:
    """``[S, hidden]`` kept. ``config``: the fields of the published configs; ``value_size``: of a value head."""
    nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
    if config.q_lora_rank is None:
        query = linear(x, weights, f"{name}.q_proj")
    else:
        low = rms_norm(linear(x, weights, f"{name}.q_a_proj"), weights[f"{name}.q_a_layernorm.weight"], INNER_EPS)
        query = linear(low, weights, f"{name}.q_b_proj")
    query = heads_of(query, nope + config.qk_rope_head_dim)
    query = np.concatenate([query[..., :nope], turn(query[..., nope:])], axis=-1)

    both = linear(x, weights, f"{name}.kv_a_proj_with_mqa")
    compressed = rms_norm(both[:, :rank], weights[f"{name}.kv_a_layernorm.weight"], INNER_EPS)
    shared = turn(both[None, :, rank:])
    if form == "latent":
        compressed, shared = rows.stored(compressed[None])[0], rows.stored(shared)
    grown = heads_of(linear(compressed, weights, f"{name}.kv_b_proj"), nope + value_size)
    shared = np.broadcast_to(shared, (len(grown), *shared.shape[1:]))
    keys, values = np.concatenate([grown[..., :nope], shared], axis=-1), grown[..., nope:]
    if form == "decompressed":
        keys, values = rows.stored(keys), rows.stored(values)
    mixed = attend(query, keys, values, visible, query.shape[-1] ** -0.5)
    return linear(mixed, weights, f"{name}.o_proj")
