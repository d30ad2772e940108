"""Qwen2-VL, text path: a Qwen2 decoder whose RoPE is M-RoPE with chunked sections.

Sources: Qwen2-VL (arXiv 2409.12191) and the published config and code of ``Qwen/Qwen2-VL-7B-Instruct``.
Parameter names are those of the checkpoint. The queries, keys and values have a bias, the output projection
has none.

A text token has the same T, H and W position, ``offset``. Sliding windows (``use_sliding_window``) are off
in every published checkpoint and are not modelled.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from reference_models import layers, rope
from reference_models.engine import masks
from reference_models.engine.kv_cache import KVCache, Storage


@dataclass(frozen=True)
class Config:
    """Fields of the text part of the published config.json; ValueError when they do not fit together."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_scaling: rope.MRopeScaling
    rope_theta: float = 1000000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
        )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        layers.check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        self.rope_scaling.check(self.head_dim)
        if self.rope_scaling.mrope_interleaved:
            raise ValueError("qwen2_vl has chunked M-RoPE sections; mrope_interleaved belongs to qwen3_vl")

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads


def attention(config: Config) -> layers.GroupedAttention:
    """The attention of any layer."""
    return layers.GroupedAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        qkv_bias=True,
    )


class Model(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.attention_layers = tuple(range(config.num_hidden_layers))
        self._inv_freq = 1 / rope.standard_freqs(config.head_dim, config.rope_theta)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        blocks = [
            layers.Block(hidden, eps, attention(config), layers.SwiGLU(hidden, config.intermediate_size))
            for _ in self.attention_layers
        ]
        self.model = layers.Trunk(config.vocab_size, hidden, eps, blocks)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def make_caches(self, storage: Storage = "rows") -> list[KVCache]:
        """Empty caches, one per attention layer."""
        return [KVCache(storage) for _ in self.attention_layers]

    def __call__(self, tokens: mx.array, caches: Sequence[KVCache], mask_policy: masks.MaskPolicy = "live") -> mx.array:
        layers.check_inputs(tokens, caches, self.attention_layers)
        batch, length = tokens.shape
        position_ids = rope.text_position_ids(caches[0].offset, 0, batch, length)
        sections = self.config.rope_scaling.mrope_section
        cos, sin = rope.mrope_angles(position_ids, self._inv_freq, sections, interleaved=False)

        def rotation(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
            return rope.apply_mrope(q, k, cos, sin)

        mask = masks.chunk_mask(length, caches[0], mask_policy)
        x = self.model.embed_tokens(tokens)
        for block, cache in zip(self.model.layers, caches, strict=True):
            x = block(x, rotation, cache, mask)
        x = self.model.norm(x)
        return self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)


def _tiny(**changes: object) -> Config:
    """The simplest tiny configuration, changed."""
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_scaling": rope.MRopeScaling((2, 1, 1)),
        "rope_theta": 100.0,
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


TINY: dict[str, Config] = {
    "one-layer": _tiny(num_hidden_layers=1),
    "plain": _tiny(),
    "one-kv-head": _tiny(num_key_value_heads=1, tie_word_embeddings=True),
    "all-kv-heads": _tiny(num_key_value_heads=4, num_hidden_layers=3),
    "wide-heads": _tiny(num_attention_heads=2, num_key_value_heads=1, rope_scaling=rope.MRopeScaling((2, 3, 3))),
}
