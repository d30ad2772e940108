"""Masks of batches against the definition, cell by cell, and against those of every row alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from reference_models.engine import BatchKVCache, KVCache, MaskPolicy, batch_mask, chunk_mask
from reference_models.engine.masks import mask_for

WINDOWS = (None, 1, 2, 3, 5, 8, 12, 2**31, 2**40)


def solo(n: int, trim: int = 0, keep: int = 0) -> KVCache:
    cache = KVCache()
    if n:
        rows = mx.ones((1, 1, n, 2))
        cache.update_and_fetch(rows, rows)
        cache.trim_front(trim, keep)
    return cache


CACHES = [solo(6), solo(0), solo(9, 4, 2), solo(8, 8), solo(3)]  # 0..5, nothing, 0 1 6 7 8, nothing at 8, 0..2
HELD = [[0, 1, 2, 3, 4, 5], [], [0, 1, 6, 7, 8], [], [0, 1, 2]]


def by_definition(
    l: int, held: Sequence[Sequence[int]], offsets: Sequence[int], window: int | None, lengths: Sequence[int]
) -> list[list[list[list[bool]]]]:
    """``[B, 1, l, slots + l]``, written down once more."""
    slots = max(map(len, held))
    mask = []
    for row, offset, length in zip(held, offsets, lengths, strict=True):
        new = [offset + i if i < length else None for i in range(l)]
        keys = [None] * (slots - len(row)) + [*row, *new]
        lines = []
        for q in range(l):
            x = offset + q
            line = [p is not None and p <= x and (window is None or x - p < window) for p in keys]
            line[slots + q] = True
            lines.append(line)
        mask.append([lines])
    return mask


@pytest.mark.parametrize("window", WINDOWS)
def test_the_mask_of_a_batch(window: int | None) -> None:
    cache = BatchKVCache.join(CACHES)
    for l in (1, 2, 5):
        mask = batch_mask(l, cache, "live", window)
        assert mask is not None and mask.dtype == mx.bool_ and mask.shape == (5, 1, l, 6 + l)
        assert mask.tolist() == by_definition(l, HELD, cache.offsets, window, [l] * 5)


@pytest.mark.parametrize("window", WINDOWS)
def test_the_mask_behind_padding_at_the_right(window: int | None) -> None:
    lengths = [4, 2, 0, 3, 1]
    cache = BatchKVCache.join(CACHES)
    expected = by_definition(5, HELD, cache.offsets, window, lengths)
    given = batch_mask(5, cache, "live", window, lengths)
    cache.prepare(lengths)
    mask = batch_mask(5, cache, "live", window)
    assert mask is not None and given is not None
    assert mask.tolist() == given.tolist() == expected
    assert np.array(mask).any(axis=-1).all()  # a softmax over nothing would not be a number


@pytest.mark.parametrize("window", WINDOWS)
def test_every_row_sees_what_it_would_see_alone(window: int | None) -> None:
    batch = BatchKVCache.join(CACHES)
    for l, policy in itertools.product((1, 3), ("live", "offset")):
        mask = batch_mask(l, batch, policy, window)
        assert mask is not None
        for row, cache in enumerate(CACHES):
            alone = chunk_mask(l, cache, policy, window)
            seen = np.array(mask[row, 0])
            width = l + (cache.live_len if policy == "live" else cache.offset)
            assert not seen[:, :-width].any()
            assert (seen[:, -width:] == (np.array(True) if alone is None else np.array(alone))).all()


def test_the_offset_policy_sizes_the_key_axis_by_the_largest_offset() -> None:
    cache = BatchKVCache.join(CACHES)
    for l in (1, 3):
        mask = batch_mask(l, cache, "offset")
        assert mask is not None and mask.shape == (5, 1, l, 9 + l)
        held = [list(range(offset)) for offset in cache.offsets]
        assert mask.tolist() == by_definition(l, held, cache.offsets, None, [l] * 5)


@pytest.mark.parametrize("policy", ["live", "offset"])
def test_policies_agree_while_nothing_was_trimmed(policy: MaskPolicy) -> None:
    cache = BatchKVCache.join([solo(5), solo(0), solo(2)])
    mask, live = batch_mask(3, cache, policy, 4), batch_mask(3, cache, "live", 4)
    assert mask is not None and live is not None and mask.tolist() == live.tolist()


@pytest.mark.parametrize("policy", ["live", "offset"])
def test_one_token_that_sees_everything_takes_no_mask(policy: MaskPolicy) -> None:
    even = BatchKVCache.join([solo(5), solo(5)])
    assert batch_mask(1, even, policy) is None and batch_mask(1, BatchKVCache("rows", 2), policy) is None
    for window in WINDOWS:
        alone = chunk_mask(1, solo(5), policy, window)
        assert (batch_mask(1, even, policy, window) is None) == (alone is None), window
    assert batch_mask(2, even, policy) is not None
    even.prepare([1, 0])  # the query that is padding has no key beside those that it may see
    assert batch_mask(1, even, policy) is None
    assert batch_mask(1, BatchKVCache.join([solo(5), solo(4)]), policy) is not None


def test_as_long_rows_at_different_places_take_none_either() -> None:
    cache = BatchKVCache.join([solo(5), solo(9, 4)])
    assert batch_mask(1, cache) is None and batch_mask(1, cache, "offset") is not None
    assert batch_mask(1, cache, window=5) is not None and batch_mask(1, cache, window=6) is None


def test_mask_for_tells_batches_apart() -> None:
    cache = BatchKVCache.join(CACHES)
    given = mx.ones((1, 1), mx.bool_)
    assert mask_for(2, cache, {None: given}) is given
    mask = mask_for(2, cache, "live", 3)
    assert mask is not None and mask.shape == (5, 1, 2, 8)
    alone = mask_for(2, CACHES[0], "live")
    assert alone is not None and alone.shape == (2, 8)


def test_bad_arguments_are_refused() -> None:
    cache = BatchKVCache.join(CACHES)
    with pytest.raises(ValueError, match="l=0"):
        batch_mask(0, cache)
    with pytest.raises(ValueError, match="got 0"):
        batch_mask(1, cache, window=0)
    with pytest.raises(ValueError, match="'width'"):
        batch_mask(1, cache, "width")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 lengths for a batch of 5 rows"):
        batch_mask(2, cache, lengths=[1, 1])
    with pytest.raises(ValueError, match=r"lengths \[1, 3, 0, 0, 0\] for 2 tokens a row"):
        batch_mask(2, cache, lengths=[1, 3, 0, 0, 0])
