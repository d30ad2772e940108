"""A rotating cache that keeps the first keys for good comes back from a batch as one that does not."""

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache

cache = RotatingKVCache(6, keep=4)
positions = mx.arange(6).reshape(1, 1, 6, 1)
cache.update_and_fetch(positions, positions)
back = BatchRotatingKVCache.merge([cache]).extract(0)
keys, _ = back.update_and_fetch(mx.full((1, 1, 1, 1), 6), mx.full((1, 1, 1, 1), 6))
held = sorted(keys.reshape(-1).tolist())
if held != [0, 1, 2, 3, 5, 6]:
    raise SystemExit(f"a cache that kept positions 0 to 3 has keep={back.keep} behind a batch, and holds {held}")
