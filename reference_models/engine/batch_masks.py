"""Masks for batches: by position, row by row, with all padding hidden."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import mlx.core as mx

from .batch_rows import BatchLengths, one_each

if TYPE_CHECKING:  # masks imports this module, so that a model need not know which cache it has
    from .masks import MaskPolicy


def batch_mask(
    l: int,
    cache: BatchLengths,
    policy: "MaskPolicy" = "live",
    window: int | None = None,
    lengths: Sequence[int] | None = None,
) -> mx.array | None:
    """Mask for a forward of l tokens a row through a batch; call it before the append.

    Args:
        l: queries of every row, in tokens, >= 1.
        cache: the cache that the forward will append to.
        policy: where the key axis comes from, as in ``masks.chunk_mask``. "offset" takes every row for one of which
            everything ever written is still there: the key axis is ``max(offsets) + l``.
        window: keys that a query may see, in tokens, its own included, counted in positions; None for no limit.
        lengths: real tokens of each row at the left of the l; None for what the cache was prepared for, or all.

    Returns:
        None where one token a row sees every key, else bool ``[B, 1, l, K + l]`` with the keys of
        ``BatchLengths.key_positions`` (the second axis stands for the heads: without it a batch of as many rows as
        there are heads would take the masks of rows for those of heads). (r, q, k) is True iff key k of row r is none
        of padding, and its position p and that of the query x satisfy ``p <= x`` and, with a window,
        ``p > x - window``, and the rule of the cache shows p to x. A query that is padding sees its own key beside,
        because a softmax over nothing is not a number.

    Raises:
        ValueError: an argument is out of range.
    """
    if l < 1:
        raise ValueError(f"a mask needs at least one query, got l={l}")
    if window is not None and window < 1:
        raise ValueError(f"a window counts the query's own key and must be >= 1, got {window}")
    lengths = cache.prepared if lengths is None else one_each("lengths", lengths, cache.batch)
    if lengths is not None and max(lengths, default=0) > l:
        raise ValueError(f"lengths {list(lengths)} for {l} tokens a row")
    query = cache.offset + mx.arange(l, dtype=mx.int32)
    key = _positions(l, cache, policy)
    visible = (key >= 0)[:, None] & cache.rule.mask(query, key)
    if window is not None and window < max(cache.offsets, default=0) + l:  # else it hides nothing: see masks._visible
        visible = visible & (key[:, None] > query[:, :, None] - window)
    if l == 1 and mx.all(visible).item():
        return None
    if lengths is not None:
        new = mx.arange(l) < mx.array(lengths)[:, None]
        before = key.shape[1] - l
        real = mx.concatenate([mx.ones((cache.batch, before), mx.bool_), new], axis=1)
        own = mx.arange(before + l) == mx.arange(l)[:, None] + before
        visible = (visible & real[:, None]) | own
    return visible[:, None]


def _positions(l: int, cache: BatchLengths, policy: "MaskPolicy") -> mx.array:
    """Position of every key behind the append, int32 ``[B, K + l]`` with -1 for padding, as the policy sees them."""
    if policy == "live":
        return cache.key_positions(l)
    if policy == "offset":
        end = max(cache.offsets, default=0) + l
        return mx.maximum(mx.arange(end, dtype=mx.int32) + (cache.offset + l - end), -1)
    raise ValueError(f"unknown mask policy {policy!r}: expected one of ('live', 'offset')")
