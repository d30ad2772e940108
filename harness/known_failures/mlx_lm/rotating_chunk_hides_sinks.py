"""A rotating cache keeps the first keys for good, and the mask of a chunk hides them from its later tokens."""

import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache


def rows(n: int) -> mx.array:
    return mx.zeros((1, 1, n, 1))


cache = RotatingKVCache(6, keep=4)
mask = cache.make_mask(7)  # a prompt of seven tokens: the last one sees the four kept, its neighbour and itself
cache.update_and_fetch(rows(7), rows(7))
keys, _ = cache.update_and_fetch(rows(1), rows(1))  # the next token is given those four, by a decode without a mask
assert keys.shape[2] == 6
seen = [position for position, shown in enumerate(mask[6].tolist()) if shown]
if seen != [0, 1, 2, 3, 5, 6]:
    raise SystemExit(f"of a cache that keeps positions 0 to 3, the token at position 6 sees {seen}")
