"""Attention calls on the caches of mlx-lm as the ledger counts them: without the slots that nobody is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.rules import CacheRule
from harness.target import AttentionCall
from harness.targets import mlx_lm_caches as held


def in_order(call: AttentionCall, cache: Any, before: Sequence[int], tokens: int) -> AttentionCall:
    """The call of a batch as the ledger counts slots: the oldest key of the longest row first, the new ones last.

    ``before``: tokens that the rows had. A cache may have slots in front that are padding to every row, since
    ``filter`` alone takes them out again; they are left out here if the mask shows them to nobody. To a single token a
    rotating cache gives its slots as they lie, with the new one in front of its cursor.
    """
    limit = cache.max_size - 1 if held.kind_of(cache) == "rotating" else call.key_len
    unused = call.key_len - tokens - max(min(count, limit) for count in before)
    shown = call.shown
    if shown is None or shown.shape[-1] != call.key_len:
        return call
    if held.kind_of(cache) == "rotating" and tokens == 1:
        shown = np.roll(shown, -cache._idx, axis=-1)
        call = replace(call, shown=shown)
    return _without(call, unused)


def of_its_chunk(call: AttentionCall, rule: CacheRule | None, start: int) -> AttentionCall:
    """The call of a cache that hands out more keys than its first token, at ``start``, sees: without those, if the mask
    shows them to nobody."""
    if rule is None or rule.chunk is None:
        return call
    return _without(call, call.key_len - call.query_len - start % rule.chunk)


def unpadded(call: AttentionCall, front: int, behind: int) -> AttentionCall:
    """The call of a row without so many slots in front of its keys and behind them that are its padding, if the mask
    shows them to nobody."""
    return _without(_without(call, front), behind, at_the_end=True)


def _without(call: AttentionCall, unused: int, at_the_end: bool = False) -> AttentionCall:
    """The call without so many keys in front, or at the end, if its mask shows them to nobody."""
    shown = call.shown
    if unused <= 0 or shown is None or call.mask_shape is None or shown.shape[-1] != call.key_len:
        return call
    gone, left = slice(unused), slice(unused, None)
    if at_the_end:
        gone, left = slice(-unused, None), slice(-unused)
    if shown[..., gone].any():
        return call
    keys, values = call.key_len - unused, call.value_len - unused
    shape = (*call.mask_shape[:-1], keys)
    return replace(call, key_len=keys, value_len=values, mask_shape=shape, shown=shown[..., left])
