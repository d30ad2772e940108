"""MiniCPM3: multi-head latent attention, LongRoPE, and scales on embedding, residuals and logits.

Sources: the published config of ``openbmb/MiniCPM3-4B`` and its model in transformers (``minicpm3``); the scales are
those of MiniCPM (arXiv 2404.06395), LongRoPE is arXiv 2402.13753. Parameter names are those of the checkpoint. Engines
cache it in either form of ``latent``: transformers the latent, mlx-lm the keys and values of every head.

Engines were seen to rotate this model at the number of keys held (``rope_from="live"``): the same number as the offset
until the first front trim, wrong behind it, and every mask is right.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import mlx.core as mx
from mlx import nn

from reference_models import latent, layers, rope
from reference_models.engine import CacheSpec, make_caches, masks
from reference_models.engine.batch_cache import Cache
from reference_models.engine.kv_cache import KVCache, Storage

RopeFrom = Literal["offset", "live"]
"""Where new tokens are said to stand: "offset" is right, "live" (the number of keys held) is the historic bug."""


@dataclass(frozen=True)
class LongRope:
    """``rope_scaling`` of the longrope type: by what every pair is slowed. ValueError when it cannot be.

    A model that is made for more than its original context turns by the long factors from its first token on, any other
    by the short ones, as the published code does when it is built. (transformers looks at the length of each forward
    instead; keys that a cache holds from before it changed its mind then do not fit the later queries.)
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if not self.short_factor or len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                f"short_factor and long_factor need one number for every pair, not {len(self.short_factor)} and "
                f"{len(self.long_factor)}"
            )
        for factor in (*self.short_factor, *self.long_factor):
            layers.check_divisors(**{"a factor of longrope": factor})
        if self.original_max_position_embeddings < 2:
            raise ValueError(
                f"original_max_position_embeddings must be at least 2, not {self.original_max_position_embeddings}"
            )

    def freqs(self, theta: float, context: int) -> mx.array:
        """``1 / inv_freq`` of every pair, float32, of a model made for ``context`` tokens."""
        factors = self.long_factor if context > self.original_max_position_embeddings else self.short_factor
        pairs = len(factors)
        return mx.array([factor * theta ** (i / pairs) for i, factor in enumerate(factors)], dtype=mx.float32)

    def amplitude(self, context: int) -> float:
        """What rotated numbers are multiplied by: ``sqrt(1 + ln(stretch) / ln(original))``, 1 if nothing is longer."""
        stretch = context / self.original_max_position_embeddings
        if stretch <= 1:
            return 1.0
        return math.sqrt(1 + math.log(stretch) / math.log(self.original_max_position_embeddings))


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json; ValueError when they do not fit together.

    ``max_position_embeddings``: the context, in tokens, that the model is made for. MLA has a key per query head, so
    ``num_key_value_heads`` says nothing and is left out.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    rope_scaling: LongRope
    max_position_embeddings: int = 32768
    rope_theta: float = 10000.0
    scale_emb: float = 12.0
    scale_depth: float = 1.4
    dim_model_base: int = 256
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        layers.check_divisors(
            rope_theta=self.rope_theta,
            rms_norm_eps=self.rms_norm_eps,
            scale_emb=self.scale_emb,
            scale_depth=self.scale_depth,
        )
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            q_lora_rank=self.q_lora_rank,
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            max_position_embeddings=self.max_position_embeddings,
            dim_model_base=self.dim_model_base,
        )
        layers.check_split(self.hidden_size, self.num_attention_heads)
        layers.check_heads(self.num_attention_heads, self.num_attention_heads, self.qk_rope_head_dim)
        if 2 * len(self.rope_scaling.short_factor) != self.qk_rope_head_dim:
            raise ValueError(
                f"short_factor has {len(self.rope_scaling.short_factor)} numbers, qk_rope_head_dim "
                f"({self.qk_rope_head_dim}) has {self.qk_rope_head_dim // 2} pairs"
            )

    @property
    def sizes(self) -> latent.Sizes:
        """Of the attention; a value head is as wide as a head of the hidden state."""
        return latent.Sizes(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            kv_rank=self.kv_lora_rank,
            q_rank=self.q_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            v=self.hidden_size // self.num_attention_heads,
        )

    @property
    def residual_scale(self) -> float:
        """What a layer's attention and feed-forward are multiplied by before they are added."""
        return self.scale_depth / math.sqrt(self.num_hidden_layers)


@dataclass(frozen=True)
class Turning:
    """How one forward rotates: frequencies ``[rope / 2]``, a factor behind, and where the new tokens stand."""

    freqs: mx.array
    amplitude: float
    rope_from: RopeFrom


class Block(nn.Module):
    """Pre-norm; what is added is scaled. ``[B, L, hidden]`` kept."""

    def __init__(self, config: Config, cache_form: latent.CacheForm):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.residual_scale = config.residual_scale
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = latent.LatentAttention(config.sizes, cache_form, config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = layers.SwiGLU(hidden, config.intermediate_size)

    def __call__(self, x: mx.array, turning: Turning, cache: Cache, mask: mx.array | None) -> mx.array:
        # Read before the cache takes the new rows.
        offset = cache.offset if turning.rope_from == "offset" else _live(cache)

        def rotation(rows: mx.array) -> mx.array:
            turned = rope.rotate(rows, offset, turning.freqs, False)
            return turned if turning.amplitude == 1.0 else turned * turning.amplitude

        x = x + self.self_attn(self.input_layernorm(x), rotation, cache, mask) * self.residual_scale
        return x + self.mlp(self.post_attention_layernorm(x)) * self.residual_scale


def _live(cache: Cache) -> int | mx.array:
    """Keys held, in place of the offset: of a batch ``[B, 1]``."""
    held = cache.live_len
    return held if isinstance(held, int) else mx.array(held, mx.int32)[:, None]


class Model(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``. ValueError for an unknown ``cache_form`` or ``rope_from``."""

    def __init__(self, config: Config, cache_form: latent.CacheForm = "latent", rope_from: RopeFrom = "offset"):
        super().__init__()
        if rope_from not in get_args(RopeFrom):
            raise ValueError(f"rope_from must be one of {get_args(RopeFrom)}, not {rope_from!r}")
        self.config, self.rope_from = config, rope_from
        self.attention_layers = tuple(range(config.num_hidden_layers))
        scaling, context = config.rope_scaling, config.max_position_embeddings
        self._freqs, self._amplitude = scaling.freqs(config.rope_theta, context), scaling.amplitude(context)
        blocks = [Block(config, cache_form) for _ in self.attention_layers]
        self.model = layers.Trunk(config.vocab_size, config.hidden_size, config.rms_norm_eps, blocks)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def make_caches(self, storage: Storage | CacheSpec = "rows") -> list[KVCache]:
        """Empty caches, one per layer."""
        return make_caches(storage, [None] * len(self.attention_layers))

    def __call__(
        self,
        tokens: mx.array,
        caches: Sequence[Cache],
        mask_policy: masks.MaskPolicy | masks.GivenMasks = "live",
    ) -> mx.array:
        layers.check_inputs(tokens, caches, self.attention_layers)
        config = self.config
        mask = masks.mask_for(tokens.shape[1], caches[0], mask_policy)
        turning = Turning(self._freqs, self._amplitude, self.rope_from)
        x = self.model.embed_tokens(tokens) * config.scale_emb
        for block, cache in zip(self.model.layers, caches, strict=True):
            x = block(x, turning, cache, mask)
        x = self.model.norm(x) * (config.dim_model_base / config.hidden_size)
        return self.model.embed_tokens.as_linear(x) if config.tie_word_embeddings else self.lm_head(x)


def _tiny(**changes: object) -> Config:
    """The simplest tiny configuration, changed: made for no more than its original context."""
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "rope_scaling": LongRope((1.0, 1.1, 1.3, 2.0), (1.0, 2.0, 4.0, 8.0), 64),
        "max_position_embeddings": 64,
        "rope_theta": 100.0,
        "scale_emb": 2.0,
        "dim_model_base": 16,
        "tie_word_embeddings": False,
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


TINY: dict[str, Config] = {
    "one-layer": _tiny(num_hidden_layers=1),
    "plain": _tiny(),
    "long": _tiny(
        num_attention_heads=2,
        rope_scaling=LongRope((1.0, 1.1, 1.3, 2.0), (1.0, 2.0, 4.0, 8.0), 8),
        max_position_embeddings=32,
    ),
    "one-head": _tiny(num_attention_heads=1, qk_nope_head_dim=4, attention_bias=True),
    "published-scales": _tiny(
        num_hidden_layers=4,
        num_attention_heads=2,
        scale_emb=12.0,
        scale_depth=1.4,
        dim_model_base=8,
        tie_word_embeddings=True,
    ),
    "one-pair": _tiny(
        num_hidden_layers=3,
        num_attention_heads=2,
        qk_rope_head_dim=2,
        q_lora_rank=8,
        kv_lora_rank=24,
        rope_scaling=LongRope((1.5,), (6.0,), 16),
        max_position_embeddings=128,
    ),
    "rows-of-32": _tiny(
        hidden_size=64,
        num_attention_heads=2,
        kv_lora_rank=32,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        rope_scaling=LongRope((1.0,) * 8 + (1.5,) * 8, (1.0, 2.0, 3.0, 4.0) * 4, 64),
    ),
}
