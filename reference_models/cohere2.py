"""Cohere 2 (Command R7B): attention and feed-forward side by side behind one LayerNorm; only windowed layers rotate.

Sources: the published config of ``CohereForAI/c4ai-command-r7b-12-2024`` and its model in transformers (``cohere2``).
Parameter names are those of the checkpoint. Nothing has a bias, the norms neither.

Layers with a sliding window turn q and k by RoPE over neighbouring pairs; layers that see everything turn nothing, so
they know of order only what the mask tells them (NoPE, arXiv 2305.19466). Which layer is which is said by
``sliding_window_pattern`` (every n-th sees everything) or layer by layer by ``layer_types``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import mlx.core as mx
from mlx import nn

from reference_models import layers, rope
from reference_models.engine import CacheSpec, make_caches, masks
from reference_models.engine.batch_cache import Cache
from reference_models.engine.kv_cache import KVCache, Storage
from reference_models.layers import LayerType

PATTERN = 4  # where a config says neither which layers slide nor how often one does not


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json; ValueError when they do not fit together.

    ``sliding_window``: keys that a token sees, its own included. With ``layer_types`` the pattern says nothing and may
    be None; if it is there it must agree.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int = 4096
    sliding_window_pattern: int | None = None
    layer_types: tuple[LayerType, ...] | None = None
    rope_theta: float = 50000.0
    layer_norm_eps: float = 1e-5
    logit_scale: float = 0.0625
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        layers.check_divisors(
            rope_theta=self.rope_theta, layer_norm_eps=self.layer_norm_eps, logit_scale=self.logit_scale
        )
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            sliding_window=self.sliding_window,
            sliding_window_pattern=self.sliding_window_pattern or PATTERN,
        )
        layers.check_split(self.hidden_size, self.num_attention_heads)
        layers.check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        layers.check_types(self.layer_types, self.num_hidden_layers)
        by_pattern = self._types_by_pattern()
        if self.layer_types and self.sliding_window_pattern and self.layer_types != by_pattern:
            raise ValueError(
                f"layer_types and sliding_window_pattern ({self.sliding_window_pattern}) disagree about which layers "
                "have a window"
            )

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of every layer: how many keys a token sees, its own included; None for all."""
        kinds = self.layer_types or self._types_by_pattern()
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in kinds)

    @property
    def rotates(self) -> bool:
        """Does any layer take a position? Without a sliding one no number of the model depends on where it stands."""
        return any(self.windows)

    def _types_by_pattern(self) -> tuple[LayerType, ...]:
        full, sliding = get_args(LayerType)
        every = self.sliding_window_pattern or PATTERN
        return tuple(sliding if (index + 1) % every else full for index in range(self.num_hidden_layers))


class Block(nn.Module):
    """``x + attention(norm(x)) + mlp(norm(x))``, ``[B, L, hidden]`` kept. ``rotates``: is it a sliding layer?"""

    def __init__(self, config: Config, rotates: bool):
        super().__init__()
        hidden = config.hidden_size
        self.rotates = rotates
        self.input_layernorm = nn.LayerNorm(hidden, eps=config.layer_norm_eps, bias=False)
        self.self_attn = layers.GroupedAttention(
            hidden, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        )
        self.mlp = layers.SwiGLU(hidden, config.intermediate_size)

    def __call__(self, x: mx.array, freqs: mx.array, cache: Cache, mask: mx.array | None) -> mx.array:
        offset = cache.offset  # absolute, and read before the cache takes the new rows

        def rotation(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
            if not self.rotates:
                return q, k
            return rope.rotate(q, offset, freqs, True), rope.rotate(k, offset, freqs, True)

        normed = self.input_layernorm(x)
        return x + self.self_attn(normed, rotation, cache, mask) + self.mlp(normed)


class Model(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.attention_layers = tuple(range(config.num_hidden_layers))
        self.windows = config.windows
        self._freqs = rope.standard_freqs(config.head_dim, config.rope_theta)
        hidden, eps = config.hidden_size, config.layer_norm_eps
        blocks = [Block(config, window is not None) for window in self.windows]
        self.model = layers.Trunk(config.vocab_size, hidden, eps, blocks)
        self.model.norm = nn.LayerNorm(hidden, eps=eps, bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def make_caches(self, storage: Storage | CacheSpec = "rows") -> list[KVCache]:
        """Empty caches, one per layer."""
        return make_caches(storage, self.windows)

    def __call__(
        self,
        tokens: mx.array,
        caches: Sequence[Cache],
        mask_policy: masks.MaskPolicy | masks.GivenMasks = "live",
    ) -> mx.array:
        layers.check_inputs(tokens, caches, self.attention_layers)
        # One mask for either kind of layer, from the first cache of that kind.
        made = {
            window: masks.mask_for(tokens.shape[1], caches[self.windows.index(window)], mask_policy, window)
            for window in dict.fromkeys(self.windows)
        }
        x = self.model.embed_tokens(tokens)
        for block, cache, window in zip(self.model.layers, caches, self.windows, strict=True):
            x = block(x, self._freqs, cache, made[window])
        x = self.model.norm(x)
        logits = self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)
        return logits * self.config.logit_scale


def _tiny(**changes: object) -> Config:
    """The simplest tiny configuration, changed: a window of 4, smaller than most chunks."""
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 4,
        "sliding_window_pattern": 2,
        "rope_theta": 100.0,
        "logit_scale": 0.25,
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


TINY: dict[str, Config] = {
    "one-layer": _tiny(num_hidden_layers=1, tie_word_embeddings=False),
    "plain": _tiny(),
    "all-sliding": _tiny(num_key_value_heads=1, sliding_window=2, sliding_window_pattern=3),
    "all-global": _tiny(num_key_value_heads=4, sliding_window_pattern=1),
    "window-of-one": _tiny(num_hidden_layers=3, sliding_window=1, sliding_window_pattern=3),
    "global-first": _tiny(
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=3,
        sliding_window_pattern=None,
        layer_types=("full_attention", "sliding_attention", "sliding_attention", "full_attention"),
    ),
    "published-pattern": _tiny(num_hidden_layers=4, sliding_window=6, sliding_window_pattern=4, logit_scale=1.0),
    "heads-of-32": _tiny(hidden_size=64, num_attention_heads=2),
}
