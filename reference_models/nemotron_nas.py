"""Nemotron-NAS (DeciLM): a Llama whose every layer was chosen by architecture search.

In each layer attention and feed-forward are, independently, the real thing, one linear map, or absent; the
ratio of query to KV heads and the feed-forward width differ from layer to layer. Sources: Puzzle (arXiv
2411.19146) and the published config and code of ``nvidia/Llama-3_1-Nemotron-51B-Instruct``, whose parameter
names are kept.

Only real attention has a cache, so the first cache need not belong to layer 0: position and mask come from
the first ATTENTION layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
from mlx import nn

from reference_models import layers, rope
from reference_models.engine import CacheSpec, make_caches, masks
from reference_models.engine.batch_cache import Cache
from reference_models.engine.kv_cache import KVCache, Storage

FFN_MULTIPLE = 256  # feed-forward widths are rounded up to a multiple of this


@dataclass(frozen=True)
class AttentionBlock:
    """``block_configs[i].attention``: exactly one of the three is set, else ValueError."""

    n_heads_in_group: int | None = None
    no_op: bool = False
    replace_with_linear: bool = False

    def __post_init__(self) -> None:
        if sum((self.n_heads_in_group is not None, self.no_op, self.replace_with_linear)) != 1:
            raise ValueError(f"set exactly one of n_heads_in_group, no_op, replace_with_linear: {self}")


@dataclass(frozen=True)
class FFNBlock:
    """``block_configs[i].ffn``: exactly one of the three is set, else ValueError."""

    ffn_mult: float | None = None
    no_op: bool = False
    replace_with_linear: bool = False

    def __post_init__(self) -> None:
        if sum((self.ffn_mult is not None, self.no_op, self.replace_with_linear)) != 1:
            raise ValueError(f"set exactly one of ffn_mult, no_op, replace_with_linear: {self}")


@dataclass(frozen=True)
class BlockConfig:
    """One entry of ``block_configs``."""

    attention: AttentionBlock
    ffn: FFNBlock


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json; ValueError when they do not fit together."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    block_configs: tuple[BlockConfig, ...]
    rope_theta: float = 500000.0
    rope_scaling: rope.Llama3Scaling | None = None
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        layers.check_divisors(rope_theta=self.rope_theta, rms_norm_eps=self.rms_norm_eps)
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
        )
        if len(self.block_configs) != self.num_hidden_layers:
            raise ValueError(
                f"block_configs has {len(self.block_configs)} entries, num_hidden_layers is {self.num_hidden_layers}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        for index, block in enumerate(self.block_configs):
            group = block.attention.n_heads_in_group
            if group is not None and (group < 1 or self.num_attention_heads % group):
                raise ValueError(
                    f"block_configs[{index}]: n_heads_in_group ({group}) must divide num_attention_heads "
                    f"({self.num_attention_heads})"
                )
            if block.ffn.ffn_mult is not None:
                name, mult = f"block_configs[{index}]: ffn_mult", block.ffn.ffn_mult
                layers.check_divisors(**{name: mult})
                if not intermediate_size(mult, self.hidden_size):
                    raise ValueError(f"{name} ({mult}) makes a feed-forward of no width")
        layers.check_heads(1, 1, self.head_dim)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head; the same in every layer."""
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the layers with real attention."""
        return tuple(
            index for index, block in enumerate(self.block_configs) if block.attention.n_heads_in_group is not None
        )


def intermediate_size(ffn_mult: float, hidden: int) -> int:
    """Published width of a feed-forward: ``int(2 * ffn_mult * hidden / 3)`` up to a multiple of 256."""
    width = int(2 * ffn_mult * hidden / 3)
    return -(-width // FFN_MULTIPLE) * FFN_MULTIPLE


class LinearAttention(nn.Module):
    """The linear map that replaces an attention: no positions, no cache. ``[B, L, hidden]`` kept."""

    def __init__(self, hidden: int, bias: bool):
        super().__init__()
        self.linear_attn = nn.Linear(hidden, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_attn(x)


class LinearMLP(nn.Module):
    """The linear map that replaces a feed-forward. ``[B, L, hidden]`` kept."""

    def __init__(self, hidden: int, bias: bool):
        super().__init__()
        self.linear_mlp = nn.Linear(hidden, hidden, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_mlp(x)


class Block(nn.Module):
    """One layer. A part that is a no-op has neither module nor norm, and its residual passes unchanged."""

    def __init__(self, config: Config, index: int):
        super().__init__()
        attention, ffn = config.block_configs[index].attention, config.block_configs[index].ffn
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.has_cache = attention.n_heads_in_group is not None
        self.self_attn: nn.Module
        self.mlp: nn.Module
        if not attention.no_op:
            self.input_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        if attention.replace_with_linear:
            self.self_attn = LinearAttention(hidden, config.attention_bias)
        elif attention.n_heads_in_group is not None:
            self.self_attn = layers.GroupedAttention(
                hidden,
                heads,
                heads // attention.n_heads_in_group,
                config.head_dim,
                qkv_bias=config.attention_bias,
                o_bias=config.attention_bias,
            )
        if not ffn.no_op:
            self.post_attention_layernorm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        if ffn.replace_with_linear:
            self.mlp = LinearMLP(hidden, config.mlp_bias)
        elif ffn.ffn_mult is not None:
            self.mlp = layers.SwiGLU(hidden, intermediate_size(ffn.ffn_mult, hidden), config.mlp_bias)

    def __call__(self, x: mx.array, freqs: mx.array, cache: Cache | None, mask: mx.array | None) -> mx.array:
        """``x [B, L, hidden]`` kept; ``cache`` is None exactly when the layer has no real attention."""
        if cache is not None:
            offset = cache.offset  # absolute, and read before the cache takes the new rows

            def rotation(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
                return rope.rotate(q, offset, freqs, False), rope.rotate(k, offset, freqs, False)

            x = x + self.self_attn(self.input_layernorm(x), rotation, cache, mask)
        elif "self_attn" in self:
            x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x)) if "mlp" in self else x


class Model(nn.Module):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``. ValueError for a config without any attention."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.attention_layers = config.attention_layers
        if not self.attention_layers:
            raise ValueError(
                f"none of the {config.num_hidden_layers} layers has real attention (all are no_op or "
                "replace_with_linear): there is nothing to cache or mask"
            )
        scaling = config.rope_scaling
        self._freqs = (
            rope.standard_freqs(config.head_dim, config.rope_theta)
            if scaling is None
            else rope.llama3_freqs(config.head_dim, config.rope_theta, scaling)
        )
        blocks = [Block(config, index) for index in range(config.num_hidden_layers)]
        self.model = layers.Trunk(config.vocab_size, config.hidden_size, config.rms_norm_eps, blocks)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def make_caches(self, storage: Storage | CacheSpec = "rows") -> list[KVCache]:
        """Empty caches, one per attention layer: fewer than layers where some have none."""
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
        remaining = iter(caches)
        for block in self.model.layers:
            x = block(x, self._freqs, next(remaining) if block.has_cache else None, mask)
        x = self.model.norm(x)
        return self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)


def _tiny(*blocks: BlockConfig, **changes: object) -> Config:
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": 4,
        "block_configs": blocks,
        "rope_theta": 100.0,
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


def _block(group: int | str, ffn: float | str = 1.0) -> BlockConfig:
    """A block from two words: heads per group or ``no_op`` / ``linear``, FFN multiplier or the same."""
    words = {"no_op": {"no_op": True}, "linear": {"replace_with_linear": True}}
    attention = AttentionBlock(**words[group]) if isinstance(group, str) else AttentionBlock(group)
    return BlockConfig(attention, FFNBlock(**words[ffn]) if isinstance(ffn, str) else FFNBlock(ffn))


TINY: dict[str, Config] = {
    "one-layer": _tiny(_block(1)),
    "plain": _tiny(_block(2), _block(2)),
    "different-groups": _tiny(_block(4), _block(1, 2.0), _block(2), tie_word_embeddings=True),
    "no-op-first": _tiny(_block("no_op"), _block(2)),
    "linear-first": _tiny(_block("linear"), _block(4), _block(2)),
    "ffn-replaced": _tiny(_block(2, "no_op"), _block("linear", "linear"), _block(4, "linear")),
    "llama3-rope": _tiny(
        _block(2),
        _block("no_op", "no_op"),
        _block(4),
        attention_bias=True,
        mlp_bias=True,
        rope_scaling=rope.Llama3Scaling(factor=4.0, original_max_position_embeddings=32),
    ),
    "heads-of-32": _tiny(_block(2), _block(2), hidden_size=64, num_attention_heads=2),
}
