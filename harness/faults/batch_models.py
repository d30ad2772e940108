"""Bugs of what a model makes of a batch: masks, positions, and what one row takes from another."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn

from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from reference_models import latent, layers, mistral4, rope
from reference_models.engine import masks

_CONTENT = "mask_shows_exactly_the_visible_set"
_POSITIONS = "positions_are_absolute"
_SOLO = "batch_rows_equal_solo_runs"


def _shows_the_padding(original: Any) -> Any:
    def batch_mask(l: int, cache: Any, *rest: Any) -> mx.array | None:
        made: mx.array | None = original(l, cache, *rest)
        if made is None:
            return None
        padding: mx.array = cache.key_positions(l) < 0
        return made | padding[:, None, None]

    return batch_mask


def _none_for_one_token(original: Any) -> Any:
    def batch_mask(l: int, *rest: Any) -> mx.array | None:
        return None if l == 1 else original(l, *rest)

    return batch_mask


def _knows_no_right_padding(original: Any) -> Any:
    def batch_mask(l: int, cache: Any, *rest: Any) -> mx.array | None:
        prepared, cache.prepared = cache.prepared, None
        try:
            made: mx.array | None = original(l, cache, *rest)
        finally:
            cache.prepared = prepared
        return made

    return batch_mask


def _without_heads(original: Any) -> Any:
    def batch_mask(*given: Any) -> mx.array | None:
        made: mx.array | None = original(*given)
        return None if made is None else made[:, 0]

    return batch_mask


def _always_explicit(original: Any) -> Any:
    def batch_mask(l: int, cache: Any, *rest: Any) -> mx.array:
        made: mx.array | None = original(l, cache, *rest)
        return mx.ones((cache.batch, 1, l, cache.key_positions(l).shape[1]), mx.bool_) if made is None else made

    return batch_mask


def _one_mask_each_head(heads: Any) -> Any:
    """``heads(attention)``: how many heads its queries have."""

    def repeated(original: Any) -> Any:
        def attention(self: Any, x: mx.array, positions: Any, cache: Any, mask: mx.array | None) -> mx.array:
            if mask is not None and mask.ndim == 4:
                mask = mx.repeat(mask, heads(self), axis=1)
            out: mx.array = original(self, x, positions, cache, mask)
            return out

        return attention

    return repeated


def _of_the_longest(offset: Any) -> Any:
    return mx.broadcast_to(offset.max(), offset.shape) if _of_rows(offset) else offset


def _of_rows(array: Any) -> bool:
    """Is it one number for each row of a batch?"""
    return isinstance(array, mx.array) and array.ndim == 2 and array.size > 0


def _of_the_first(rows: Any) -> Any:
    return mx.broadcast_to(rows[:1], rows.shape) if _of_rows(rows) else rows


def _rotates_as_the_longest(original: Any) -> Any:
    def rotate(x: mx.array, offset: Any, *rest: Any) -> mx.array:
        out: mx.array = original(x, _of_the_longest(offset), *rest)
        return out

    return rotate


def _ids_of_the_longest(original: Any) -> Any:
    def ids(offset: Any, *rest: Any) -> mx.array:
        out: mx.array = original(_of_the_longest(offset), *rest)
        return out

    return ids


def _delta_of_the_first(original: Any) -> Any:
    def ids(offset: Any, delta: Any, *rest: Any) -> mx.array:
        out: mx.array = original(offset, _of_the_first(delta), *rest)
        return out

    return ids


def _positions_of_the_first(original: Any) -> Any:
    def positions(*given: Any) -> mx.array:
        out: mx.array = _of_the_first(original(*given))
        return out

    return positions


def _loses_the_mask(original: Any) -> Any:
    def attend(self: Any, *given: Any) -> mx.array:
        out: mx.array = original(self, *given[:-1], None)
        return out

    return attend


def _norm_of_the_first(original: Any) -> Any:
    def norm(self: Any, x: mx.array) -> mx.array:
        out: mx.array = original(self, x)
        if x.ndim != 3 or x.shape[0] == 1:
            return out
        size = mx.rsqrt(mx.mean(mx.square(x), axis=-1, keepdims=True) + self.eps)
        return out / size * size[:1]

    return norm


def _scales_queries(target: Any) -> bool:
    return hasattr(getattr(target.variant.config, "rope_parameters", None), "llama_4_scaling_beta")


def _caches_latents(target: Any) -> bool:
    return (
        hasattr(target.variant.config, "kv_lora_rank")
        and target.variant.options.get("cache_form", "latent") == "latent"
    )


def _mask(make: Any) -> Any:
    return replacing(masks, "batch_mask", make)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "batch-mask-shows-the-padding",
        "the mask is causal and does not hide the padding at the left of a short row",
        _CONTENT,
        _mask(_shows_the_padding),
        "ml-explore/mlx-lm#1906",
        layer="mask",
    ),
    Fault(
        "batch-decode-without-a-mask",
        "a forward of one token a row takes no mask, as if no row were padded",
        _CONTENT,
        _mask(_none_for_one_token),
        "OpenNMT/OpenNMT-py#2532",
        layer="mask",
    ),
    Fault(
        "batch-mask-without-heads",
        "the mask is [B, l, K]: taken for that of heads, it is refused, or silently another row's where B heads are",
        _CONTENT,
        _mask(_without_heads),
        "hyunwoongko/transformer#32",
        layer="mask",
    ),
    Fault(
        "batch-rotates-as-the-longest-row",
        "all rows are rotated as if they stood where the longest one does",
        _POSITIONS,
        both(
            replacing(rope, "rotate", _rotates_as_the_longest),
            replacing(rope, "text_position_ids", _ids_of_the_longest),
        ),
        "unslothai/unsloth#3699",
        layer="positions",
    ),
    Fault(
        "batch-query-scale-of-the-first-row",
        "all rows have their queries scaled for the position of the first one",
        _POSITIONS,
        replacing(rope, "positions_from", _positions_of_the_first),
        "ml-explore/mlx-lm#671",
        shown_on=_scales_queries,
        layer="positions",
    ),
    Fault(
        "batch-norms-of-the-first-row",
        "in a batch norms divide every row by the size of the first one",
        _SOLO,
        both(*(replacing(norm, "__call__", _norm_of_the_first) for norm in (nn.RMSNorm, nn.LayerNorm))),
        source="EricLBuehler/candle-vllm#140 (the first row's number was used for all; of a mask)",
        layer="model",
    ),
    Fault(
        "batch-absorbed-decode-loses-the-mask",
        "in MLA's form for one token the scores of the rotated part take the place of the mask",
        _SOLO,
        both(
            replacing(mistral4.LatentAttention, "_attend_absorbed", _loses_the_mask),
            replacing(latent.LatentAttention, "_attend_absorbed", _loses_the_mask),
        ),
        source="keras-team/keras#23038 (one of two paths of attention dropped the mask)",
        shown_on=_caches_latents,
        layer="attention",
    ),
)

IMAGE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "batch-delta-of-the-first-row",
        "what images of the first row save in position ids is taken for saved in every row",
        _POSITIONS,
        replacing(rope, "text_position_ids", _delta_of_the_first),
        "Blaizzy/mlx-vlm#1095",
        layer="positions",
    ),
)
"""Of the path with images alone."""

VARIATIONS: tuple[Fault, ...] = (
    Fault(
        "batch-mask-for-everything",
        "every forward of a batch has a mask, also where it hides nothing",
        None,
        _mask(_always_explicit),
    ),
    Fault(
        "batch-mask-without-right-padding",
        "what pads a row at the right is hidden by causality alone, and sees all in front of it",
        None,
        _mask(_knows_no_right_padding),
    ),
    Fault(
        "batch-mask-of-every-head",
        "masks of shape [B, heads, l, K]",
        None,
        both(
            replacing(
                layers.GroupedAttention,
                "__call__",
                _one_mask_each_head(lambda self: self.q_proj.weight.shape[0] // self.head_dim),
            ),
            replacing(
                mistral4.LatentAttention,
                "__call__",
                _one_mask_each_head(lambda self: self.config.num_attention_heads),
            ),
            replacing(latent.LatentAttention, "__call__", _one_mask_each_head(lambda self: self.sizes.heads)),
        ),
    ),
)
