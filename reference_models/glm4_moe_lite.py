"""GLM-4 MoE Lite (GLM-4.7-Flash): multi-head latent attention, and experts that a sigmoid chooses with a correction.

Sources: the published config of ``zai-org/GLM-4.7-Flash`` and its model in transformers (``glm4_moe_lite``); the
routing is that of DeepSeek-V3 (arXiv 2412.19437), see ``moe.SigmoidRouter``. Parameter names are those of the
checkpoint; experts: see ``moe.Experts``. Engines cache either form of ``latent``.

The layer behind the last one, which guesses a token further ahead, is no part of the model here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from reference_models import latent, layers, moe, rope
from reference_models.engine import CacheSpec, make_caches, masks
from reference_models.engine.batch_cache import Cache
from reference_models.engine.kv_cache import KVCache, Storage


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json; ValueError when they do not fit together.

    MLA has a key per query head, so ``num_key_value_heads`` says nothing and is left out. The first
    ``first_k_dense_replace`` layers have a dense feed-forward.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_theta: float = 1000000.0
    rope_interleave: bool = True
    n_routed_experts: int = 64
    n_shared_experts: int = 1
    num_experts_per_tok: int = 4
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.8
    first_k_dense_replace: int = 1
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        layers.check_divisors(rope_theta=self.rope_theta, rms_norm_eps=self.rms_norm_eps)
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            moe_intermediate_size=self.moe_intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            kv_lora_rank=self.kv_lora_rank,
            q_lora_rank=1 if self.q_lora_rank is None else self.q_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            v_head_dim=self.v_head_dim,
            n_shared_experts=self.n_shared_experts,
        )
        layers.check_heads(self.num_attention_heads, self.num_attention_heads, self.qk_rope_head_dim)
        moe.check_routing(self.n_routed_experts, self.num_experts_per_tok, self.n_group, self.topk_group)
        if not 0 <= self.first_k_dense_replace <= self.num_hidden_layers:
            raise ValueError(
                f"first_k_dense_replace ({self.first_k_dense_replace}) must lie in 0..num_hidden_layers "
                f"({self.num_hidden_layers})"
            )

    @property
    def sizes(self) -> latent.Sizes:
        """Of the attention."""
        return latent.Sizes(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            kv_rank=self.kv_lora_rank,
            q_rank=self.q_lora_rank,
            nope=self.qk_nope_head_dim,
            rope=self.qk_rope_head_dim,
            v=self.v_head_dim,
        )


def feed_forward(config: Config, index: int) -> nn.Module:
    """Dense SwiGLU in the first ``first_k_dense_replace`` layers, else routed plus shared experts."""
    if index < config.first_k_dense_replace:
        return layers.SwiGLU(config.hidden_size, config.intermediate_size)
    router = moe.SigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
        n_group=config.n_group,
        topk_group=config.topk_group,
    )
    experts = moe.Experts(config.n_routed_experts, config.hidden_size, config.moe_intermediate_size)
    shared = layers.SwiGLU(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts)
    return moe.SparseMLP(router, experts, shared)


class Block(nn.Module):
    """Pre-norm. ``[B, L, hidden]`` kept."""

    def __init__(self, config: Config, index: int, cache_form: latent.CacheForm):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.interleaved = config.rope_interleave
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = latent.LatentAttention(config.sizes, cache_form, config.attention_bias)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = feed_forward(config, index)

    def __call__(self, x: mx.array, freqs: mx.array, cache: Cache, mask: mx.array | None) -> mx.array:
        offset = cache.offset  # absolute, and read before the cache takes the new rows

        def rotation(rows: mx.array) -> mx.array:
            return rope.rotate(rows, offset, freqs, self.interleaved)

        x = x + self.self_attn(self.input_layernorm(x), rotation, cache, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``. ValueError for an unknown ``cache_form``."""

    def __init__(self, config: Config, cache_form: latent.CacheForm = "latent"):
        super().__init__()
        self.config = config
        self.attention_layers = tuple(range(config.num_hidden_layers))
        self._freqs = rope.standard_freqs(config.qk_rope_head_dim, config.rope_theta)
        blocks = [Block(config, index, cache_form) for index in self.attention_layers]
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
        mask = masks.mask_for(tokens.shape[1], caches[0], mask_policy)
        x = self.model.embed_tokens(tokens)
        for block, cache in zip(self.model.layers, caches, strict=True):
            x = block(x, self._freqs, cache, mask)
        x = self.model.norm(x)
        return self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)


def _tiny(**changes: object) -> Config:
    """The simplest tiny configuration, changed: a dense layer, then one with four experts."""
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "rope_theta": 100.0,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


TINY: dict[str, Config] = {
    "one-layer": _tiny(num_hidden_layers=1, first_k_dense_replace=0),
    "plain": _tiny(),
    "one-expert": _tiny(
        num_attention_heads=2, num_experts_per_tok=1, q_lora_rank=16, v_head_dim=12, attention_bias=True
    ),
    "groups": _tiny(
        num_attention_heads=3, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
    ),
    "all-experts": _tiny(
        num_hidden_layers=3,
        num_attention_heads=2,
        first_k_dense_replace=2,
        rope_interleave=False,
        tie_word_embeddings=True,
        num_experts_per_tok=4,  # nothing is left to choose
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    ),
    "one-head": _tiny(num_attention_heads=1, qk_rope_head_dim=2, q_lora_rank=8, kv_lora_rank=24),
    "rows-of-32": _tiny(
        num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32
    ),
}
