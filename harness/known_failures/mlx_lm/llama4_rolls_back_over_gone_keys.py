"""Chunked caches say that they can be trimmed, and go back to where the next token would see a key that is gone."""

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache, can_trim_prompt_cache, trim_prompt_cache

CHUNK = 4
cache = ChunkedKVCache(CHUNK)
for _ in range(6):  # six decodes, as llama4 makes them; the key at position 0 leaves in front of the sixth
    cache.maybe_trim_front()
    cache.update_and_fetch(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
if not can_trim_prompt_cache([cache]):
    raise SystemExit(0)
trim_prompt_cache([cache], 3)  # rejected drafts: the next token stands at position 3, in the chunk of 0 to 3
held = list(range(cache.start_position, cache.offset))
if held != [0, 1, 2]:
    raise SystemExit(f"the token at position 3 of the chunk 0 to 3 sees the keys at {held}, not at [0, 1, 2]")
