"""Parts that several families share: SwiGLU, grouped-query attention, the pre-norm block, the trunk.

Parameter names are those of the Hugging Face checkpoints (``self_attn.q_proj``, ``mlp.gate_proj``, ...).
"""

from collections.abc import Callable, Sequence
from typing import Literal, get_args

import mlx.core as mx
from mlx import nn

from reference_models.engine.batch_cache import Cache
from reference_models.engine.batch_rows import BatchLengths

#: The positive numbers of float32, without the denormal ones, which a device may take for 0.
SMALLEST, LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127

Rotation = Callable[[mx.array, mx.array], tuple[mx.array, mx.array]]

LayerType = Literal["full_attention", "sliding_attention"]
"""What ``layer_types`` of a config says of a layer."""


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * up(x))``, ``[.., hidden] -> [.., hidden]`` (Shazeer 2020, arXiv 2002.05202)."""

    def __init__(self, hidden: int, intermediate: int, bias: bool = False):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class GroupedAttention(nn.Module):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245) over a cache.

    ``qk_norm_eps`` adds the RMS norm on each head of q and k that Qwen3 has; the biases follow the family.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=qkv_bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=o_bias)
        self.qk_norm = qk_norm_eps is not None
        if qk_norm_eps is not None:
            self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps)

    def __call__(self, x: mx.array, rotation: Rotation, cache: Cache, mask: mx.array | None) -> mx.array:
        """``x [B, L, hidden]`` kept. ``rotation`` maps q and k before the cache takes the new rows."""
        q, k, v = self.project(x)
        q, k = rotation(q, k)
        k, v = cache.update_and_fetch(k, v)
        out = mx.fast.scaled_dot_product_attention(q, k, v, scale=self.head_dim**-0.5, mask=mask)
        return self.o_proj(merge_heads(out))

    def project(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """q ``[B, heads, L, D]``, k and v ``[B, kv_heads, L, D]`` of ``x [B, L, hidden]``, normed but not rotated."""
        q = split_heads(self.q_proj(x), self.head_dim)
        k = split_heads(self.k_proj(x), self.head_dim)
        v = split_heads(self.v_proj(x), self.head_dim)
        return (self.q_norm(q), self.k_norm(k), v) if self.qk_norm else (q, k, v)


def split_heads(x: mx.array, head_dim: int) -> mx.array:
    """``[B, L, H * head_dim] -> [B, H, L, head_dim]``."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, -1, head_dim).transpose(0, 2, 1, 3)


def merge_heads(x: mx.array) -> mx.array:
    """``[B, H, L, D] -> [B, L, H * D]``."""
    batch, _, length, _ = x.shape
    return x.transpose(0, 2, 1, 3).reshape(batch, length, -1)


class Trunk(nn.Module):
    """What the checkpoints call ``model``: embedding, layers, last norm. The family writes the forward."""

    def __init__(self, vocab: int, hidden: int, eps: float, layers: Sequence[nn.Module]):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = list(layers)
        self.norm: nn.Module = nn.RMSNorm(hidden, eps=eps)


class Block(nn.Module):
    """Pre-norm block: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, hidden: int, eps: float, attention: nn.Module, mlp: nn.Module):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = attention
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = mlp

    def __call__(self, x: mx.array, *attention_arguments: object) -> mx.array:
        x = x + self.self_attn(self.input_layernorm(x), *attention_arguments)
        return x + self.mlp(self.post_attention_layernorm(x))


def check_inputs(tokens: mx.array, caches: Sequence[Cache], attention_layers: Sequence[int]) -> None:
    """Raise ValueError unless ``tokens`` is ``[B, L]``, L > 0, with one cache per attention layer, of B rows if it is a
    batch."""
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ValueError(f"tokens must be [B, L] with L > 0, not {list(tokens.shape)}")
    if len(caches) != len(attention_layers):
        raise ValueError(
            f"got {len(caches)} caches for {len(attention_layers)} attention layers (model layers "
            f"{list(attention_layers)}); make them with make_caches()"
        )
    if caches and isinstance(caches[0], BatchLengths) and caches[0].batch != tokens.shape[0]:
        raise ValueError(f"tokens {list(tokens.shape)} for caches of {caches[0].batch} rows")


def check_heads(heads: int, kv_heads: int, head_dim: int) -> None:
    """Raise ValueError unless the KV heads divide the query heads and a head splits into pairs."""
    if heads < 1 or kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"head_dim must be even and positive, not {head_dim}: RoPE turns pairs")


def check_split(hidden: int, heads: int) -> None:
    """Raise ValueError unless the width of the model splits into its heads."""
    if hidden % heads:
        raise ValueError(f"hidden_size ({hidden}) must be a multiple of num_attention_heads ({heads})")


def check_types(kinds: Sequence[str] | None, count: int) -> None:
    """Raise ValueError unless ``layer_types`` is absent or names a known type for each of ``count`` layers."""
    known = get_args(LayerType)
    if kinds is not None and (len(kinds) != count or set(kinds) - set(known)):
        raise ValueError(f"layer_types must name one of {', '.join(known)} for each of {count} layers")


def check_positive(**sizes: int) -> None:
    """Raise ValueError, naming the field, for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, not {size}")


def check_divisors(**numbers: float) -> None:
    """Raise ValueError, naming the field, unless a number is above zero and one of float32, not denormal."""
    for name, number in numbers.items():
        if not SMALLEST <= number <= LARGEST:  # false for NaN
            raise ValueError(f"{name} must be above 0 and fit float32 ({SMALLEST:.1e} to {LARGEST:.1e}), not {number}")
