"""OLMo 3: norms behind attention and feed-forward instead of before them, and over all heads of q and of k at once.

Sources: the published config of ``allenai/Olmo-3-7B-Instruct`` and its model in transformers (``olmo3``); norms behind
and on q and k from OLMo 2 (arXiv 2501.00656). Parameter names are those of the checkpoint.

Three of four layers (or what ``layer_types`` says) have a sliding window. Those turn by plain RoPE; if the context was
stretched, the layers that see everything, and they alone, turn by YaRN (arXiv 2309.00071).
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

FULL_EVERY = 4  # without layer_types every fourth layer sees everything


@dataclass(frozen=True)
class YarnScaling:
    """``rope_scaling`` of the layers that see everything; ValueError when it makes no ramp.

    ``attention_factor``: on the rotated q and k; None for YaRN's own, ``0.1 ln(factor) + 1``.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        self.ramp(10000.0)
        if self.attention_factor is not None:
            layers.check_divisors(attention_factor=self.attention_factor)

    def ramp(self, theta: float) -> rope.YarnScaling:
        """The same as the ramp of ``rope``, over frequencies of base ``theta``."""
        return rope.YarnScaling(
            factor=self.factor,
            original_max_position_embeddings=self.original_max_position_embeddings,
            rope_theta=theta,
            beta_fast=self.beta_fast,
            beta_slow=self.beta_slow,
        )

    @property
    def amplitude(self) -> float:
        """What rotated numbers are multiplied by."""
        return rope.yarn_mscale(self.factor, 1.0) if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json; ValueError when they do not fit together.

    ``sliding_window``: keys that a token sees, its own included.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    sliding_window: int = 4096
    layer_types: tuple[LayerType, ...] | None = None
    rope_theta: float = 500000.0
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        layers.check_divisors(rope_theta=self.rope_theta, rms_norm_eps=self.rms_norm_eps)
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            sliding_window=self.sliding_window,
        )
        layers.check_split(self.hidden_size, self.num_attention_heads)
        layers.check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        layers.check_types(self.layer_types, self.num_hidden_layers)
        if self.rope_scaling is not None:
            self.rope_scaling.ramp(self.rope_theta)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of every layer: how many keys a token sees, its own included; None for all."""
        full, sliding = get_args(LayerType)
        by_depth = [full if index % FULL_EVERY == 0 else sliding for index in range(1, self.num_hidden_layers + 1)]
        return tuple(self.sliding_window if kind == sliding else None for kind in self.layer_types or by_depth)


@dataclass(frozen=True)
class Turning:
    """How layers of one kind rotate: frequencies ``[head_dim / 2]``, and a factor on what was rotated."""

    freqs: mx.array
    amplitude: float = 1.0

    def __call__(self, x: mx.array, offset: int | mx.array) -> mx.array:
        turned = rope.rotate(x, offset, self.freqs, False)
        return turned if self.amplitude == 1.0 else turned * self.amplitude


class Attention(layers.GroupedAttention):
    """Grouped-query attention whose norms take all heads of a token together."""

    def __init__(self, config: Config):
        super().__init__(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
        )
        self.q_norm = nn.RMSNorm(config.num_attention_heads * config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.num_key_value_heads * config.head_dim, eps=config.rms_norm_eps)

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """As in the base; the norms come before the heads are parted."""
        q, k = self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x))
        q, k, v = (layers.split_heads(rows, self.head_dim) for rows in (q, k, self.v_proj(x)))
        return q, k, v


class Block(nn.Module):
    """``x + norm(attention(x))``, then ``x + norm(mlp(x))``; ``[B, L, hidden]`` kept."""

    def __init__(self, config: Config):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = layers.SwiGLU(hidden, config.intermediate_size)
        self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)

    def __call__(self, x: mx.array, turning: Turning, cache: Cache, mask: mx.array | None) -> mx.array:
        offset = cache.offset  # absolute, and read before the cache takes the new rows

        def rotation(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
            return turning(q, offset), turning(k, offset)

        x = x + self.post_attention_layernorm(self.self_attn(x, rotation, cache, mask))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Model(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.attention_layers = tuple(range(config.num_hidden_layers))
        self.windows = config.windows
        self._sliding = self._full = Turning(rope.standard_freqs(config.head_dim, config.rope_theta))
        if (scaling := config.rope_scaling) is not None:
            stretched = rope.yarn_freqs(config.head_dim, scaling.ramp(config.rope_theta))
            self._full = Turning(stretched, scaling.amplitude)
        blocks = [Block(config) for _ in self.attention_layers]
        self.model = layers.Trunk(config.vocab_size, config.hidden_size, config.rms_norm_eps, blocks)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

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
            x = block(x, self._full if window is None else self._sliding, cache, made[window])
        x = self.model.norm(x)
        return self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)


def _tiny(**changes: object) -> Config:
    """The simplest tiny configuration, changed: a window of 4, then a layer that sees everything."""
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "sliding_window": 4,
        "layer_types": ("sliding_attention", "full_attention"),
        "rope_theta": 100.0,
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


#: Only betas below 1 give the ramp two ends inside the four pairs of a head.
_YARN = YarnScaling(factor=4.0, original_max_position_embeddings=8, beta_fast=0.3, beta_slow=0.05)

TINY: dict[str, Config] = {
    "one-layer": _tiny(num_hidden_layers=1, layer_types=None),
    "plain": _tiny(),
    "all-sliding": _tiny(num_key_value_heads=1, sliding_window=2, layer_types=("sliding_attention",) * 2),
    "all-full": _tiny(num_key_value_heads=4, layer_types=("full_attention",) * 2, rope_scaling=_YARN),
    "window-of-one": _tiny(
        num_hidden_layers=3,
        sliding_window=1,
        layer_types=("full_attention", "sliding_attention", "full_attention"),
        tie_word_embeddings=True,
    ),
    "yarn": _tiny(num_attention_heads=2, num_key_value_heads=1, rope_scaling=_YARN, attention_bias=True),
    "published-types": _tiny(
        num_hidden_layers=4,
        sliding_window=6,
        layer_types=None,
        rope_scaling=YarnScaling(factor=8.0, original_max_position_embeddings=16, attention_factor=1.3),
    ),
    "heads-of-32": _tiny(hidden_size=64, num_attention_heads=2),
}
