"""Masks against the definition, cell by cell."""

import itertools
from dataclasses import dataclass

import mlx.core as mx
import pytest

from reference_models.engine import (
    KVCache,
    MaskPolicy,
    VisibilityRule,
    causal_mask,
    chunk_mask,
    key_axis_before,
    rotating_mask,
)

WINDOWS = (None, 1, 2, 3, 4, 5, 6, 12, 2**31, 2**40)


@dataclass(frozen=True)
class Lengths:
    offset: int
    live_len: int

    @property
    def positions(self) -> mx.array:
        return mx.arange(self.offset - self.live_len, self.offset)

    rule = VisibilityRule()

    def key_positions(self, l: int) -> mx.array:
        return mx.arange(self.offset - self.live_len, self.offset + l)


def by_definition(l: int, before: int, window: int | None) -> list[list[bool]]:
    """Row q is the token at index before + q; it sees itself and what came less than window tokens ago."""
    return [
        [before + q >= k and (window is None or before + q - k < window) for k in range(before + l)] for q in range(l)
    ]


@pytest.mark.parametrize("window", WINDOWS)
def test_causal_mask(window: int | None) -> None:
    for l, before in itertools.product(range(1, 6), range(8)):
        mask = causal_mask(l, before, window)
        assert mask.dtype == mx.bool_
        assert mask.shape == (l, before + l)
        assert mask.tolist() == by_definition(l, before, window)


@pytest.mark.parametrize("window", [w for w in WINDOWS if w is not None])
def test_rotating_mask_is_the_end_of_the_full_one(window: int) -> None:
    for l, before in itertools.product(range(1, 6), range(8)):
        mask = rotating_mask(l, before, window)
        kept = min(before, window - 1)
        assert mask.shape == (l, kept + l)
        full = by_definition(l, before, window)
        assert mask.tolist() == [row[before - kept :] for row in full]
        assert not any(any(row[: before - kept]) for row in full), "a column cut off was visible"


def test_no_row_is_empty() -> None:
    for l, before, window in itertools.product((1, 4), (0, 1, 7), WINDOWS):
        assert mx.all(mx.any(causal_mask(l, before, window), axis=-1)).item()


def test_key_axis_follows_the_policy() -> None:
    cache = Lengths(offset=10, live_len=6)
    assert (key_axis_before(cache, "live"), key_axis_before(cache, "offset")) == (6, 10)


@pytest.mark.parametrize(("policy", "before"), [("live", 6), ("offset", 10)])
@pytest.mark.parametrize("window", WINDOWS)
def test_chunk_mask_is_full_width(policy: MaskPolicy, before: int, window: int | None) -> None:
    cache = Lengths(offset=10, live_len=6)
    for l in (1, 2, 5):
        mask = chunk_mask(l, cache, policy, window)
        if l == 1 and (window is None or window > before):  # it sees every key
            assert mask is None
        else:
            assert mask is not None
            assert mask.tolist() == by_definition(l, before, window)


def test_chunk_mask_is_live_by_default_and_the_policies_agree_before_a_trim() -> None:
    cache = KVCache()
    first = chunk_mask(3, cache)
    assert first is not None and first.tolist() == by_definition(3, 0, None)
    cache.update_and_fetch(mx.ones((1, 1, 5, 2)), mx.ones((1, 1, 5, 2)))
    live, offset = chunk_mask(3, cache, "live"), chunk_mask(3, cache, "offset")
    assert live is not None and offset is not None and mx.array_equal(live, offset)
    cache.trim_front(2)
    after = chunk_mask(3, cache)
    assert after is not None and after.shape == (3, 6)


@pytest.mark.parametrize("window", [1, 3, 5, 9])
def test_a_window_counts_positions_also_behind_kept_sinks(window: int) -> None:
    cache = KVCache()
    rows = mx.ones((1, 1, 12, 2))
    cache.update_and_fetch(rows, rows)
    cache.trim_front(5, keep=2)  # held: 0 1 7 8 9 10 11
    cache.rollback(2)  # held: 0 1 7 8 9
    held = [0, 1, 7, 8, 9]
    assert cache.positions.tolist() == held
    for l in (1, 2, 4):
        queries = list(range(10, 10 + l))
        visible = [[0 <= q - k < window for k in held + queries] for q in queries]
        mask = chunk_mask(l, cache, "live", window)
        assert mask is not None and mask.tolist() == visible
        wrong = chunk_mask(l, cache, "offset", window)
        assert wrong is not None and wrong.tolist() == by_definition(l, 10, window)
    # 11 is how far the oldest sink lies behind, itself included: nothing is hidden any more.
    assert chunk_mask(1, cache, "live", 10) is not None and chunk_mask(1, cache, "live", 11) is None


def test_bad_arguments_are_refused() -> None:
    cache = Lengths(offset=3, live_len=3)
    with pytest.raises(ValueError, match="l=0"):
        causal_mask(0, 3)
    with pytest.raises(ValueError, match="-1 keys"):
        causal_mask(2, -1)
    with pytest.raises(ValueError, match="got 0"):
        causal_mask(2, 3, 0)
    with pytest.raises(ValueError, match="l=0"):
        rotating_mask(0, 3, 2)
    with pytest.raises(ValueError, match="-1 keys"):
        rotating_mask(2, -1, 2)
    with pytest.raises(ValueError, match="got 0"):
        rotating_mask(2, 3, 0)
    with pytest.raises(ValueError, match="l=0"):
        chunk_mask(0, cache)
    with pytest.raises(ValueError, match="got 0"):
        chunk_mask(1, cache, window=0)
    with pytest.raises(ValueError, match="'width'"):
        chunk_mask(1, cache, "width")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'width'"):
        key_axis_before(cache, "width")  # type: ignore[arg-type]
