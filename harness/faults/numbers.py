"""Bugs of numbers: those that are none, and those that depend on how, or how often, a forward is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from reference_models import rope
from reference_models.engine import batch_cache, masks

_FINITE = "every_forward_gives_finite_logits"


def _padding_sees_nothing(original: Any) -> Any:
    """A query that is padding at the right does not even see itself. No row of tokens sees its key, but the layer
    behind makes keys and values of what is no number, and ``0 * nan`` is none either."""

    def batch_mask(l: int, cache: Any, *rest: Any) -> mx.array | None:
        made: mx.array | None = original(l, cache, *rest)
        if made is None or cache.prepared is None:
            return made
        real = mx.arange(l) < mx.array(cache.prepared)[:, None]
        return mx.where(made & real[:, None, :, None], 0.0, -mx.inf)

    return batch_mask


def _never_cleared(original: Any) -> Any:
    """Slots that no token was written to hold what was in memory before: here, no numbers."""

    def gathered(side: Any, rows: Sequence[int], kept: Sequence[Sequence[range]], slots: int) -> Any:
        made = original(side, rows, kept, slots)
        for array in made.arrays:
            for row, runs in enumerate(kept):
                if mx.issubdtype(array.dtype, mx.floating):
                    array[row, :, : slots - sum(map(len, runs))] = mx.nan
        return made

    return gathered


def _stretched_by_the_length(original: Any) -> Any:
    """Positions are right, and frequencies fall with the number of tokens in the forward, as in a dynamic scaling that
    takes the length of a chunk for that of the text."""

    def rotate(x: mx.array, offset: Any, freqs: mx.array, *rest: Any, **named: Any) -> mx.array:
        rotated: mx.array = original(x, offset, freqs * _stretch(x.shape[-2]), *rest, **named)
        return rotated

    return rotate


def _angles_by_the_length(original: Any) -> Any:
    def mrope_angles(position_ids: mx.array, inv_freq: mx.array, *rest: Any, **named: Any) -> Any:
        return original(position_ids, inv_freq / _stretch(position_ids.shape[-1]), *rest, **named)

    return mrope_angles


def _stretch(length: int) -> float:
    return 1 + (length - 1) / 4


@contextmanager
def _adds_from_the_newest() -> Iterator[None]:
    """The fixed policy has additive masks, and the path for those adds the newest key up first."""
    chunk_mask, attention = masks.chunk_mask, mx.fast.scaled_dot_product_attention

    def additive(l: int, cache: Any, policy: Any = "live", window: int | None = None) -> mx.array | None:
        mask = chunk_mask(l, cache, policy, window)
        return mask if mask is None or policy != "live" else mx.where(mask, 0.0, -mx.inf)

    def reversed_(q: mx.array, k: mx.array, v: mx.array, *args: Any, mask: Any = None, **named: Any) -> Any:
        if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
            k, v, mask = k[..., ::-1, :], v[..., ::-1, :], mask[..., ::-1]
        return attention(q, k, v, *args, mask=mask, **named)

    masks.chunk_mask, mx.fast.scaled_dot_product_attention = additive, reversed_
    try:
        yield
    finally:
        masks.chunk_mask, mx.fast.scaled_dot_product_attention = chunk_mask, attention


def _drops_out(original: Any) -> Any:
    """As in training: a tenth of what attention gives is dropped at random."""

    def attention(*given: Any, **named: Any) -> mx.array:
        out: mx.array = original(*given, **named)
        return out * mx.random.bernoulli(0.9, out.shape)

    return attention


FAULTS: tuple[Fault, ...] = (
    Fault(
        "padding-sees-nothing",
        "what pads a row at the right sees no key at all, and what comes of it spreads to its row in the next layer",
        _FINITE,
        replacing(masks, "batch_mask", _padding_sees_nothing),
        source="unslothai/unsloth#9848 (there it was padding at the left)",
        shown_on=lambda target: len(target.attention_layers) > 1,
        layer="mask",
    ),
    Fault(
        "padding-is-never-cleared",
        "slots in front of a short row hold what was in memory, and a weight of 0 times no number is no number",
        _FINITE,
        replacing(batch_cache, "gathered", _never_cleared),
        source="Dao-AILab/flash-attention#2374",
        layer="batch",
    ),
    Fault(
        "frequencies-by-the-length-of-the-forward",
        "RoPE turns slower in a longer forward: positions are right, and keys keep the frequencies of their chunk",
        "chunks_equal_one_shot",
        both(
            replacing(rope, "rotate", _stretched_by_the_length), replacing(rope, "mrope_angles", _angles_by_the_length)
        ),
        source="huggingface/transformers#25104 (dynamic scaling: cached keys keep the base of their time)",
        layer="positions",
    ),
    Fault(
        "fix-adds-in-another-order",
        "the fixed policy takes a path of attention that sums from the newest key on: right, but not byte for byte",
        "untrimmed_outputs_are_byte_identical",
        _adds_from_the_newest,
        source="ml-explore/mlx-lm#1109 (another dispatch of kernels flipped near ties)",
        layer="attention",
    ),
    Fault(
        "dropout-stays-on",
        "attention drops a tenth of its output at random, as in training",
        "same_program_same_bytes",
        replacing(mx.fast, "scaled_dot_product_attention", _drops_out),
        source="coleygroup/ms-pred#38",
        layer="attention",
    ),
)
