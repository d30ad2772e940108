"""Multi-head latent attention without more to it (DeepSeek-V2, arXiv 2405.04434), for the families that share it.

A token leaves two things behind: a latent (``kv_lora_rank`` numbers, from which each head's key and value grow) and one
rotated key that all heads share. Engines cache these (``cache_form="latent"``) or the per-head keys and values grown
from them (``"decompressed"``). Parameter names are those of the checkpoints. Mistral 4 has an attention of its own: its
queries are scaled by position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import mlx.core as mx
from mlx import nn

from reference_models import layers
from reference_models.engine.batch_cache import Cache
from reference_models.mistral4 import LATENT_NORM_EPS
from reference_models.mistral4 import CacheForm as CacheForm


@dataclass(frozen=True)
class Sizes:
    """Of one attention. ``nope`` and ``rope``: dimensions of a query head that do not rotate, and that do; ``v``: of a
    value head; ``q_rank``: of the latent that queries grow from, None where they come from the hidden state."""

    hidden: int
    heads: int
    kv_rank: int
    q_rank: int | None
    nope: int
    rope: int
    v: int


class LatentAttention(nn.Module):
    """``[B, L, hidden] -> [B, L, hidden]``. ``bias``: of the projections from and to the hidden state.

    ValueError for an unknown ``cache_form``.
    """

    def __init__(self, sizes: Sizes, cache_form: CacheForm, bias: bool = False):
        super().__init__()
        if cache_form not in get_args(CacheForm):
            raise ValueError(f"cache_form must be one of {get_args(CacheForm)}, not {cache_form!r}")
        self.sizes, self.cache_form = sizes, cache_form
        hidden, heads, width = sizes.hidden, sizes.heads, sizes.nope + sizes.rope
        if sizes.q_rank is None:
            self.q_proj = nn.Linear(hidden, heads * width, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, sizes.q_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(sizes.q_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(sizes.q_rank, heads * width, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, sizes.kv_rank + sizes.rope, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(sizes.kv_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(sizes.kv_rank, heads * (sizes.nope + sizes.v), bias=False)
        self.o_proj = nn.Linear(heads * sizes.v, hidden, bias=bias)
        self.scale = width**-0.5

    def __call__(
        self, x: mx.array, rotation: Callable[[mx.array], mx.array], cache: Cache, mask: mx.array | None
    ) -> mx.array:
        """``rotation`` turns ``[B, H, L, rope]`` before the cache takes the new rows."""
        sizes = self.sizes
        q_nope, q_rope = mx.split(layers.split_heads(self._query(x), sizes.nope + sizes.rope), [sizes.nope], axis=-1)
        latent, k_rope = mx.split(self.kv_a_proj_with_mqa(x)[:, None], [sizes.kv_rank], axis=-1)
        latent = self.kv_a_layernorm(latent)  # [B, 1, L, kv_rank]
        q_rope, k_rope = rotation(q_rope), rotation(k_rope)  # the key is the same for all heads
        if self.cache_form == "decompressed":
            keys, values = cache.update_and_fetch(*self._grow(latent, k_rope))
            return self._attend(q_nope, q_rope, keys, values, mask)
        latent, k_rope = cache.update_and_fetch(latent, k_rope)
        if x.shape[1] == 1:
            return self._attend_absorbed(q_nope, q_rope, latent, k_rope, mask)
        return self._attend(q_nope, q_rope, *self._grow(latent, k_rope), mask)

    def _query(self, x: mx.array) -> mx.array:
        return self.q_proj(x) if self.sizes.q_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))

    def _grow(self, latent: mx.array, k_rope: mx.array) -> tuple[mx.array, mx.array]:
        """Keys ``[B, H, T, nope + rope]`` and values ``[B, H, T, v]`` of every head."""
        grown = layers.split_heads(self.kv_b_proj(latent.squeeze(1)), self.sizes.nope + self.sizes.v)
        k_nope, values = mx.split(grown, [self.sizes.nope], axis=-1)
        shared = mx.broadcast_to(k_rope, (*k_nope.shape[:-1], self.sizes.rope))
        return mx.concatenate([k_nope, shared], axis=-1), values

    def _attend(
        self, q_nope: mx.array, q_rope: mx.array, keys: mx.array, values: mx.array, mask: mx.array | None
    ) -> mx.array:
        query = mx.concatenate([q_nope, q_rope], axis=-1)
        out = mx.fast.scaled_dot_product_attention(query, keys, values, scale=self.scale, mask=mask)
        return self.o_proj(layers.merge_heads(out))

    def _attend_absorbed(
        self, q_nope: mx.array, q_rope: mx.array, latent: mx.array, k_rope: mx.array, mask: mx.array | None
    ) -> mx.array:
        """One query per head against the latent itself; no key or value is grown.

        The head's key matrix moves to the query, its value matrix to the output; the scores of the rotated part come
        in as an additive mask, as engines do it.
        """
        matrix = self.kv_b_proj.weight.reshape(self.sizes.heads, -1, self.sizes.kv_rank)
        to_key, to_value = mx.split(matrix, [self.sizes.nope], axis=1)
        rotated = (q_rope * self.scale) @ k_rope.swapaxes(-1, -2)  # [B, H, 1, T]
        if mask is not None:
            rotated = mx.where(mask, rotated, -mx.inf)
        out = mx.fast.scaled_dot_product_attention(q_nope @ to_key, latent, latent, scale=self.scale, mask=rotated)
        return self.o_proj(layers.merge_heads(out @ to_value.swapaxes(-1, -2)))
