"""Boolean attention masks: rows are queries, columns are keys, True means visible."""

from collections.abc import Mapping
from typing import Literal, Protocol, get_args

import mlx.core as mx

from .batch_masks import batch_mask
from .batch_rows import BatchLengths
from .visibility import EVERYTHING, VisibilityRule

MaskPolicy = Literal["live", "offset"]
"""Where a model takes the key axis from: "live" is right, "offset" is the historic bug."""


GivenMasks = Mapping[int | None, mx.array]
"""Masks that a forward is given instead of a policy: of every sliding window (None: of layers without one)."""


class CacheLengths(Protocol):
    """What a mask needs to know of a cache, in tokens."""

    @property
    def offset(self) -> int:
        """Absolute position of the next token."""

    @property
    def live_len(self) -> int:
        """Number of keys that the next append will return besides the new ones."""

    @property
    def positions(self) -> mx.array:
        """Absolute positions of the keys held, in slot order: int32 ``[held]``; ``[live_len]`` without a rule."""

    @property
    def rule(self) -> VisibilityRule:
        """What the cache itself says about who sees what. A cache with a rule returns to a single token only keys that
        the rule shows it."""

    def key_positions(self, l: int) -> mx.array:
        """Positions of the keys that an append of l tokens will return, in its order: int32 ``[live_len + l]``."""


def causal_mask(l: int, before: int, window: int | None = None) -> mx.array:
    """Causal mask for l new tokens behind ``before`` keys.

    Args:
        l: queries, in tokens, >= 1.
        before: keys already held, in tokens, >= 0.
        window: keys that a query may see, in tokens, >= 1, its own key included; None for no limit.

    Returns:
        bool ``[l, before + l]``: (q, k) is True iff ``k <= q + before`` and, with a window,
        ``k > q + before - window``. Each row sees at least its own key.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(l, before, window)
    key = mx.arange(before + l, dtype=mx.int32)
    return _visible(key[before:], key, before + l, window)


def rotating_mask(l: int, before: int, window: int) -> mx.array:
    """Windowed mask in the clamped form for rotating caches, which keep at most ``window - 1`` old keys.

    Args:
        l: queries, in tokens, >= 1.
        before: keys visible before the append, in tokens, >= 0.
        window: as in ``causal_mask``.

    Returns:
        bool ``[l, kept + l]`` with ``kept = min(before, window - 1)``: the last ``kept + l`` columns of
        ``causal_mask(l, before, window)``.

    Raises:
        ValueError: an argument is out of range.
    """
    _check(l, before, window)
    # The columns cut off are hidden from every row, and shifting queries and keys by the same amount
    # leaves the rule unchanged.
    return causal_mask(l, min(before, window - 1), window)


def key_axis_before(cache: CacheLengths, policy: MaskPolicy) -> int:
    """Keys that a mask assumes to be held before the append, in tokens.

    Raises:
        ValueError: the policy is unknown.
    """
    if policy == "live":
        return cache.live_len
    if policy == "offset":
        return cache.offset
    raise ValueError(f"unknown mask policy {policy!r}: expected one of {get_args(MaskPolicy)}")


def chunk_mask(l: int, cache: CacheLengths, policy: MaskPolicy = "live", window: int | None = None) -> mx.array | None:
    """Mask for a forward of l tokens, over all keys that the cache will return; call it before the append.

    A window counts absolute positions, not slots: the two agree as long as what is held is contiguous, and behind kept
    sinks they do not. Keys keep the rotation of their position, so the distance that RoPE shows attention is the
    distance of positions; a window over slots would show keys from further back than the layer was trained on, and
    which ones would depend on what was trimmed. Sinks that fall out of the window are hidden.

    Args:
        l: queries, in tokens, >= 1.
        cache: the cache that the forward will append to; where it has a rule of its own, that counts as well.
        policy: where the key axis comes from.
        window: of the layer, as in ``causal_mask``.

    Returns:
        None for one token that sees every key, else bool ``[l, key_axis_before(cache, policy) + l]``: True iff the
        key's position p and the query's q satisfy ``p <= q`` and, with a window, ``p > q - window``, and the rule of
        the cache. The policy "offset" takes slot i for position i, as if everything ever written were still there.

    Raises:
        ValueError: the policy is unknown or an argument is out of range.
    """
    before = key_axis_before(cache, policy)
    _check(l, before, window)
    if cache.rule != EVERYTHING:
        return _ruled_mask(l, cache, policy, window)
    if window is None:
        return None if l == 1 else causal_mask(l, before)
    end = cache.offset + l
    query = mx.arange(cache.offset, end, dtype=mx.int32)
    held = cache.positions if policy == "live" else mx.arange(before, dtype=mx.int32)
    key = mx.concatenate([held, query])
    if l == 1 and (window >= end or (key[0] > cache.offset - window).item()):  # the first is the oldest
        return None
    return _visible(query, key, end, window)


def mask_for(
    l: int, cache: CacheLengths | BatchLengths, given: MaskPolicy | GivenMasks, window: int | None = None
) -> mx.array | None:
    """The mask of the layers with this window: the one that was given, or ``chunk_mask`` under the policy given (of a
    batch, ``batch_mask``)."""
    if isinstance(given, Mapping):
        return given[window]
    if isinstance(cache, BatchLengths):
        return batch_mask(l, cache, given, window)
    return chunk_mask(l, cache, given, window)


def _ruled_mask(l: int, cache: CacheLengths, policy: MaskPolicy, window: int | None) -> mx.array | None:
    end = cache.offset + l
    query = mx.arange(cache.offset, end, dtype=mx.int32)
    returned = cache.key_positions(l)
    # Under either policy: no engine masks the single token of such a cache, so there is no length to get wrong.
    if l == 1 and (window is None or mx.all(_visible(query, returned, end, window)).item()):
        return None
    key = returned if policy == "live" else mx.arange(end, dtype=mx.int32)
    return cache.rule.mask(query, key) & _visible(query, key, end, window)


def _visible(query: mx.array, key: mx.array, end: int, window: int | None) -> mx.array:
    """Which ``key`` each ``query`` sees, both by position, all below ``end``."""
    visible = key <= query[:, None]
    if window is None or window >= end:  # it hides nothing, and may not fit in an int32
        return visible
    return visible & (key > query[:, None] - window)


def _check(l: int, before: int, window: int | None) -> None:
    if l < 1:
        raise ValueError(f"a mask needs at least one query, got l={l}")
    if before < 0:
        raise ValueError(f"a mask cannot have {before} keys before the chunk")
    if window is not None and window < 1:
        raise ValueError(f"a window counts the query's own key and must be >= 1, got {window}")
