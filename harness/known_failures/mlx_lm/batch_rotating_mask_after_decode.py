"""Behind a decode that turned a batched rotating cache, the mask of a chunk hides the oldest key of a shorter row."""

import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, RotatingKVCache


def rows(n: int) -> mx.array:
    return mx.zeros((1, 1, n, 1))


long, short = RotatingKVCache(4), RotatingKVCache(4)
long.update_and_fetch(rows(4), rows(4))
short.update_and_fetch(rows(1), rows(1))
batch = BatchRotatingKVCache.merge([long, short])
batch.update_and_fetch(mx.zeros((2, 1, 1, 1)), mx.zeros((2, 1, 1, 1)))  # a decode: the cache of the longer row is full
mask = batch.make_mask(2)  # for a chunk of two: slots are one of padding, positions 0 and 1 of the short row, the chunk
seen = mask[1, 0, 0].tolist()  # by the token at position 2, whose window of 4 holds positions 0, 1 and itself
if seen != [False, True, True, True, False]:
    raise SystemExit(f"the token at position 2 of the shorter row sees the slots {seen}, not position 0")
