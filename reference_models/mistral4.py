"""Mistral 4: multi-head latent attention (MLA), mixture of experts, YaRN RoPE, absolute query scale.

Sources: the published config and code of ``mistralai/Mistral-Small-4-119B-2603`` (``mistral4`` in
transformers), MLA from DeepSeek-V2 (arXiv 2405.04434). Parameter names are those of the checkpoint;
experts: see ``moe.Experts``.

A token leaves two things behind: a latent (``kv_lora_rank`` numbers, from which each head's key and value
grow) and one rotated key that all heads share. Engines cache these (``cache_form="latent"``) or the
per-head keys and values grown from them (``"decompressed"``). The numbers agree; the shapes that cache and
attention see do not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import mlx.core as mx
from mlx import nn

from reference_models import layers, moe, rope
from reference_models.engine import CacheSpec, make_caches, masks
from reference_models.engine.batch_cache import Cache
from reference_models.engine.kv_cache import KVCache, Storage

CacheForm = Literal["latent", "decompressed"]
LATENT_NORM_EPS = 1e-6  # the norms inside MLA do not follow rms_norm_eps in the published code


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json; ValueError when they do not fit together.

    MLA has a key per query head, so ``num_key_value_heads`` says nothing and is left out.
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
    rope_parameters: rope.YarnScaling
    q_lora_rank: int | None = None
    n_routed_experts: int = 4
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    rope_interleave: bool = True
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        layers.check_divisors(rms_norm_eps=self.rms_norm_eps)
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
    def qk_head_dim(self) -> int:
        """Dimensions of a query head: unrotated, then rotated."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class Positions:
    """What one forward knows about its new tokens: frequencies ``[rope / 2]`` and query scale ``[L, 1]``, or of
    every row of a batch ``[B, 1, L, 1]``."""

    freqs: mx.array
    query_scale: mx.array


class LatentAttention(nn.Module):
    """MLA over either cache form. ``[B, L, hidden] -> [B, L, hidden]``."""

    def __init__(self, config: Config, cache_form: CacheForm):
        super().__init__()
        self.config, self.cache_form = config, cache_form
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, config.kv_lora_rank + config.qk_rope_head_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(
            config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * config.v_head_dim, hidden, bias=bias)
        self.scale = config.qk_head_dim**-0.5 * rope.yarn_softmax_factor(config.rope_parameters)
        self.rope_factor = rope.yarn_attention_factor(config.rope_parameters)

    def __call__(self, x: mx.array, positions: Positions, cache: Cache, mask: mx.array | None) -> mx.array:
        config, offset = self.config, cache.offset
        query = layers.split_heads(self._project_query(x), config.qk_head_dim)
        q_nope, q_rope = mx.split(query, [config.qk_nope_head_dim], axis=-1)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x)[:, None], [config.kv_lora_rank], axis=-1)
        latent = self.kv_a_layernorm(latent)  # [B, 1, L, kv_lora_rank]

        q_rope = self._rotate(q_rope, offset, positions.freqs)
        k_rope = self._rotate(k_rope, offset, positions.freqs)  # [B, 1, L, rope], the same for all heads
        # After RoPE, and on both parts: the scale belongs to the query as a whole.
        query_scale = positions.query_scale.astype(x.dtype)
        q_nope, q_rope = q_nope * query_scale, q_rope * query_scale

        if self.cache_form == "decompressed":
            keys, values = cache.update_and_fetch(*self._expand(latent, k_rope))
            out = self._attend(q_nope, q_rope, keys, values, mask)
        else:
            latent, k_rope = cache.update_and_fetch(latent, k_rope)
            if x.shape[1] == 1:
                out = self._attend_absorbed(q_nope, q_rope, latent, k_rope, mask)
            else:
                out = self._attend(q_nope, q_rope, *self._expand(latent, k_rope), mask)
        return self.o_proj(layers.merge_heads(out))

    def _project_query(self, x: mx.array) -> mx.array:
        if self.config.q_lora_rank is None:
            return self.q_proj(x)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _rotate(self, x: mx.array, offset: int | mx.array, freqs: mx.array) -> mx.array:
        rotated = rope.rotate(x, offset, freqs, self.config.rope_interleave)
        return rotated if self.rope_factor == 1.0 else rotated * self.rope_factor

    def _expand(self, latent: mx.array, k_rope: mx.array) -> tuple[mx.array, mx.array]:
        """Per-head keys ``[B, H, T, nope + rope]`` and values ``[B, H, T, v]`` grown from the latent."""
        config = self.config
        grown = layers.split_heads(self.kv_b_proj(latent.squeeze(1)), config.qk_nope_head_dim + config.v_head_dim)
        k_nope, values = mx.split(grown, [config.qk_nope_head_dim], axis=-1)
        k_rope = mx.broadcast_to(k_rope, (*k_nope.shape[:-1], config.qk_rope_head_dim))
        return mx.concatenate([k_nope, k_rope], axis=-1), values

    def _attend(
        self, q_nope: mx.array, q_rope: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
    ) -> mx.array:
        query = mx.concatenate([q_nope, q_rope], axis=-1)
        return mx.fast.scaled_dot_product_attention(query, keys, values, scale=self.scale, mask=mask)

    def _attend_absorbed(
        self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, mask: mx.array | None
    ) -> mx.array:
        """One query per head against the latent itself, ``[B, H, 1, v]``: no key or value is ever grown.

        ``q . (W_k c) = (W_k^T q) . c``, so the head's key matrix moves to the query and its value matrix to
        the output. The rotated part cannot move; its scores come in as an additive mask, as engines do.
        """
        config = self.config
        grow = self.kv_b_proj.weight.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        w_key, w_value = mx.split(grow, [config.qk_nope_head_dim], axis=1)
        rope_scores = (q_rope * self.scale) @ k_rope.swapaxes(-1, -2)  # [B, H, 1, T]
        if mask is not None:  # the place where a mask goes is taken
            rope_scores = mx.where(mask, rope_scores, -mx.inf)
        out = mx.fast.scaled_dot_product_attention(q_nope @ w_key, latent, latent, scale=self.scale, mask=rope_scores)
        return out @ w_value.swapaxes(-1, -2)


def feed_forward(config: Config, index: int) -> nn.Module:
    """Dense SwiGLU in the first ``first_k_dense_replace`` layers, else routed plus shared experts."""
    if index < config.first_k_dense_replace:
        return layers.SwiGLU(config.hidden_size, config.intermediate_size)
    router = moe.TopKRouter(
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


class Model(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``. ValueError for an unknown ``cache_form``."""

    def __init__(self, config: Config, cache_form: CacheForm = "latent"):
        super().__init__()
        if cache_form not in get_args(CacheForm):
            raise ValueError(f"cache_form must be one of {get_args(CacheForm)}, not {cache_form!r}")
        self.config = config
        self.attention_layers = tuple(range(config.num_hidden_layers))
        self._freqs = rope.yarn_freqs(config.qk_rope_head_dim, config.rope_parameters)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        blocks = [
            layers.Block(hidden, eps, LatentAttention(config, cache_form), feed_forward(config, index))
            for index in self.attention_layers
        ]
        self.model = layers.Trunk(config.vocab_size, hidden, eps, blocks)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(hidden, config.vocab_size, bias=False)

    def make_caches(self, storage: Storage | CacheSpec = "rows") -> list[KVCache]:
        """Empty caches, one per attention layer."""
        return make_caches(storage, [None] * len(self.attention_layers))

    def __call__(
        self,
        tokens: mx.array,
        caches: Sequence[Cache],
        mask_policy: masks.MaskPolicy | masks.GivenMasks = "live",
    ) -> mx.array:
        layers.check_inputs(tokens, caches, self.attention_layers)
        offset, length = caches[0].offset, tokens.shape[1]
        parameters = self.config.rope_parameters
        query_scale = rope.absolute_query_scale(
            rope.positions_from(offset, length),
            parameters.llama_4_scaling_beta,
            parameters.original_max_position_embeddings,
        )
        query_scale = query_scale[:, None, :, None] if query_scale.ndim == 2 else query_scale[:, None]
        positions = Positions(self._freqs, query_scale)
        mask = masks.mask_for(length, caches[0], mask_policy)
        x = self.model.embed_tokens(tokens)
        for block, cache in zip(self.model.layers, caches, strict=True):
            x = block(x, positions, cache, mask)
        x = self.model.norm(x)
        return self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)


def _tiny(**changes: object) -> Config:
    """The simplest tiny configuration, changed.

    The query scale moves every 8 positions. No pair makes many turns in a context of 8, so only betas below 1
    give YaRN's ramp two ends inside the four pairs: kept, kept, between, slowed.
    """
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
        "rope_parameters": rope.YarnScaling(
            factor=4.0, original_max_position_embeddings=8, rope_theta=100.0, beta_fast=0.3, beta_slow=0.05
        ),
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


TINY: dict[str, Config] = {
    "one-layer-dense": _tiny(num_hidden_layers=1, first_k_dense_replace=1),
    "experts": _tiny(),
    "q-lora": _tiny(num_attention_heads=2, q_lora_rank=16, v_head_dim=12, first_k_dense_replace=1),
    "groups": _tiny(
        num_attention_heads=3, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, n_shared_experts=2
    ),
    "mscale": _tiny(
        num_attention_heads=2,
        rope_interleave=False,
        tie_word_embeddings=True,
        num_experts_per_tok=4,  # all of them: nothing is left to choose
        norm_topk_prob=False,
        routed_scaling_factor=1.5,
        attention_bias=True,
        rope_parameters=rope.YarnScaling(
            factor=8.0,
            original_max_position_embeddings=8,
            mscale=0.7,
            mscale_all_dim=1.3,
            llama_4_scaling_beta=0.5,
        ),
    ),
    "rows-of-32": _tiny(
        kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, num_attention_heads=2
    ),
}
