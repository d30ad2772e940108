"""What the catalogue of mlx-lm's families says of one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Attention = Literal["grouped", "latent", "shared keys", "grouped, with states", "latent, with states"]


@dataclass(frozen=True)
class Family:
    """One ``mlx_lm.models`` module.

    ``config``: tiny, and ours. ``attention``: how keys are made (``with states``: other layers are recurrent or
    convolve). ``windows``: of every attention call of a forward, in call order, by what the configuration says of its
    layer; () where no layer has any. ``calls``: of every attention call its layer and the cache that it reads,
    counted over the caches with keys; () where every layer attends to the keys of its own. ``module``: where it is not
    """

    config: dict[str, Any]
    attention: Attention = "grouped"
    windows: tuple[int | None, ...] = ()
    calls: tuple[tuple[int, int], ...] = ()
    module: str = ""
    limits: tuple[str, ...] = field(default=())
    variant: str = "tiny"


TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
"""What most configurations have in common."""

LATENT: dict[str, Any] = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def text(**changes: Any) -> dict[str, Any]:
    """TEXT with changes; None takes a field out."""
    merged = {**TEXT, **changes}
    return {name: value for name, value in merged.items() if value is not None}
