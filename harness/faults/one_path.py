"""Bugs of one path through a model that show in the logits alone: what it hands to RoPE, to attention as a mask and to
the cache is counted right."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from reference_models import latent, layers, mistral4, moe
from reference_models.engine import KVCache

_CACHE_FREE = "outputs_equal_the_cache_free_forward"
_WITNESS = "outputs_equal_the_witness"


def _any(lengths: int | tuple[int, ...]) -> bool:
    """Of a sequence, or of any row of a batch."""
    return any(lengths) if isinstance(lengths, tuple) else lengths > 0


def _scale_after_a_trim() -> Any:
    def grouped(original: Any) -> Any:
        def attention(self: Any, x: mx.array, rotation: Any, cache: Any, mask: Any) -> mx.array:
            def turned(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
                q, k = rotation(q, k)
                return (q * 1.1 if _any(cache.live_start) else q), k

            out: mx.array = original(self, x, turned, cache, mask)
            return out

        return attention

    def compressed(original: Any) -> Any:
        def attention(self: Any, x: mx.array, positions: Any, cache: Any, mask: Any) -> mx.array:
            scale = self.scale
            self.scale = scale * (1.1 if _any(cache.live_start) else 1)
            try:
                out: mx.array = original(self, x, positions, cache, mask)
            finally:
                self.scale = scale
            return out

        return attention

    return both(
        replacing(layers.GroupedAttention, "__call__", grouped),
        replacing(mistral4.LatentAttention, "__call__", compressed),
        replacing(latent.LatentAttention, "__call__", compressed),
    )


def _heads_in_turn(original: Any) -> Any:
    def attention(self: Any, x: mx.array, rotation: Any, cache: Any, mask: Any) -> mx.array:
        def turned(q: mx.array, k: mx.array) -> tuple[mx.array, mx.array]:
            q, k = rotation(q, k)
            if q.shape[2] == 1:
                return q, k
            order = mx.arange(q.shape[1]).reshape(k.shape[1], -1).T.reshape(-1)
            return q[:, order], k

        out: mx.array = original(self, x, turned, cache, mask)
        return out

    return attention


def _shares_heads(target: Any) -> bool:
    """Are there several KV heads, each of several queries?"""
    config = target.variant.config
    heads = config.num_attention_heads
    blocks = getattr(config, "block_configs", None)
    if blocks is None:
        return bool(1 < getattr(config, "num_key_value_heads", heads) < heads)
    return any(1 < (block.attention.n_heads_in_group or 1) < heads for block in blocks)


def _norms_without_weight() -> Any:
    """Of whichever kind a family has."""

    def planted(bare: Any) -> Any:
        def make(original: Any) -> Any:
            def norm(self: Any, x: mx.array) -> mx.array:
                out: mx.array = bare(self, x) if x.ndim == 3 and x.shape[1] == 1 else original(self, x)
                return out

            return norm

        return make

    return both(
        replacing(nn.RMSNorm, "__call__", planted(lambda self, x: mx.fast.rms_norm(x, None, self.eps))),
        replacing(nn.LayerNorm, "__call__", planted(lambda self, x: mx.fast.layer_norm(x, None, None, self.eps))),
    )


def _latent_not_normed(original: Any) -> Any:
    def attention(self: Any, x: mx.array, positions: Any, cache: Any, mask: Any) -> mx.array:
        norm = self.kv_a_layernorm
        if _any(cache.live_len):
            self.kv_a_layernorm = nn.Identity()
        try:
            out: mx.array = original(self, x, positions, cache, mask)
        finally:
            self.kv_a_layernorm = norm
        return out

    return attention


def _scale_by_live_length(original: Any) -> Any:
    def attention(self: Any, x: mx.array, positions: Any, cache: Any, mask: Any) -> mx.array:
        if x.shape[1] > 1 and isinstance(cache, KVCache) and cache.live_start:
            rule = self.config.rope_parameters
            live = mx.arange(cache.live_len, cache.live_len + x.shape[1])[:, None]
            steps = mx.floor(live.astype(mx.float32) / rule.original_max_position_embeddings)
            scale = 1 + rule.llama_4_scaling_beta * mx.log(1 + steps)
            positions = mistral4.Positions(positions.freqs, scale)
        out: mx.array = original(self, x, positions, cache, mask)
        return out

    return attention


def _another_expert(original: Any) -> Any:
    def choose(self: Any, x: mx.array) -> tuple[mx.array, mx.array]:
        indices, weights = original(self, x)
        if x.shape[-2] == 1:
            indices = (indices + 1) % self.weight.shape[0]
        return indices, weights

    return choose


def _has_experts(target: Any) -> bool:
    leaves: Any = tree_flatten(target.variant.model().parameters())
    return any("experts" in name for name, _ in leaves)


def _is_latent(target: Any) -> bool:
    return hasattr(target.variant.config, "kv_lora_rank")


def _scales_queries(target: Any) -> bool:
    return hasattr(getattr(target.variant.config, "rope_parameters", None), "llama_4_scaling_beta")


def _sums_in_reverse(original: Any) -> Any:
    def linear(self: Any, x: mx.array) -> mx.array:
        out: mx.array = x[..., ::-1] @ self.weight[:, ::-1].T
        return out + self.bias if "bias" in self else out

    return linear


def _experts_in_reverse(original: Any) -> Any:
    def experts(self: Any, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        out: mx.array = original(self, x, indices[..., ::-1], weights[..., ::-1])
        return out

    return experts


FAULTS: tuple[Fault, ...] = (
    Fault(
        "softmax-scale-changes-after-a-trim",
        "scores are a tenth larger once something was trimmed",
        _CACHE_FREE,
        _scale_after_a_trim(),
        source="flagos-ai/vllm-plugin-FL#400 (there decode alone used another scale)",
        layer="attention",
    ),
    Fault(
        "heads-grouped-in-turn-in-chunks",
        "in a chunk query heads take KV heads in turn instead of in groups",
        _WITNESS,
        replacing(layers.GroupedAttention, "__call__", _heads_in_turn),
        source="onnx/onnx#7274",
        shown_on=_shares_heads,
        layer="attention",
    ),
    Fault(
        "norm-without-weight-for-one-token",
        "the path for a single token leaves out the weights of the norms",
        _CACHE_FREE,
        _norms_without_weight(),
        layer="model",
    ),
    Fault(
        "latent-not-normed-on-later-writes",
        "the latent is normed when the cache is empty, and not behind that",
        _CACHE_FREE,
        both(
            replacing(mistral4.LatentAttention, "__call__", _latent_not_normed),
            replacing(latent.LatentAttention, "__call__", _latent_not_normed),
        ),
        source="vllm-project/vllm#26042 (MLA was wrong in chunks, and worse in short ones)",
        shown_on=_is_latent,
        layer="model",
    ),
    Fault(
        "query-scale-by-live-length-in-chunks",
        "a chunk behind a trim scales its queries by the number of keys held, after the right scale was computed",
        _CACHE_FREE,
        replacing(mistral4.LatentAttention, "__call__", _scale_by_live_length),
        source="huggingface/transformers#44860 (queries scaled for another position)",
        shown_on=_scales_queries,
        layer="positions",
    ),
    Fault(
        "another-expert-for-one-token",
        "the path for a single token takes the experts next to those that were chosen",
        _CACHE_FREE,
        replacing(moe.TopKRouter, "__call__", _another_expert),
        source="1bit-MONSTER/1bit-MONSTER#1713",
        shown_on=_has_experts,
        layer="model",
    ),
)
"""No property but the two of the outputs finds one of these: a test insists."""

VARIATIONS: tuple[Fault, ...] = (
    Fault(
        "sums-in-reverse",
        "linear maps add from the last number on",
        None,
        replacing(nn.Linear, "__call__", _sums_in_reverse),
    ),
    Fault(
        "experts-in-reverse",
        "experts are added from the least on",
        None,
        replacing(moe.Experts, "__call__", _experts_in_reverse),
        shown_on=_has_experts,
    ),
)
"""Right to the last bits but one: another order of summation."""
