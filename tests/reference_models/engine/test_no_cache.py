"""In place of a cache: positions and masks are given, nothing is kept."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models import registry, rope
from reference_models.engine import KVCache, NoCache, mask_for

ROWS = mx.random.normal((1, 2, 5, 8), key=mx.random.key(1))


def test_it_gives_back_what_a_cache_would() -> None:
    for storage in ("rows", "int8"):
        mine, theirs = NoCache(storage=storage), KVCache(storage)
        for got, wanted in zip(mine.update_and_fetch(ROWS, -ROWS), theirs.update_and_fetch(ROWS, -ROWS), strict=True):
            assert mx.array_equal(got, wanted)
        assert (mine.offset, mine.live_len, mine.live_start) == (0, 0, 0)
    assert mx.array_equal(NoCache().update_and_fetch(ROWS, ROWS)[0], ROWS)
    with pytest.raises(ValueError, match="unknown storage 'int4'"):
        NoCache(storage="int4")  # type: ignore[arg-type]


def test_rows_turn_by_positions_of_their_own() -> None:
    freqs = rope.standard_freqs(8, 100.0)
    for interleaved in (False, True):
        together = rope.rotate(ROWS, mx.array([3, 4, 5, 6, 7]), freqs, interleaved)
        assert np.allclose(together, rope.rotate(ROWS, 3, freqs, interleaved), atol=1e-6)
        apart = rope.rotate(ROWS, mx.array([9, 0, 2, 2, 70]), freqs, interleaved)
        for row, position in enumerate((9, 0, 2, 2, 70)):
            alone = rope.rotate(ROWS[:, :, row : row + 1], position, freqs, interleaved)
            assert np.allclose(apart[:, :, row : row + 1], alone, atol=1e-6)


def test_given_masks_are_taken_as_they_are() -> None:
    cache, one = KVCache(), mx.zeros((3, 3), mx.bool_)
    assert mask_for(3, cache, {None: one}) is one
    assert mask_for(3, cache, {4: one}, 4) is one
    with pytest.raises(KeyError):
        mask_for(3, cache, {None: one}, 4)
    assert mx.array_equal(mask_for(3, cache, "live"), mx.tri(3, dtype=mx.bool_))


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_one_forward_without_a_cache_is_one_with(family: str) -> None:
    for variant in registry.variants(family):
        model: Any = variant.build(2)
        windows = getattr(model, "windows", (None,) * len(model.attention_layers))
        tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
        behind = np.arange(8)[:, None] - np.arange(8)
        masks = {window: mx.array((behind >= 0) & (behind < (window or 8))) for window in windows}
        offset = 0 if hasattr(model, "read") else mx.arange(8)
        got = model(tokens, [NoCache(offset) for _ in windows], masks)
        wanted = model(tokens, model.make_caches())
        assert np.abs(np.array(got) - np.array(wanted)).max() <= 1e-5 * np.array(wanted).std()
