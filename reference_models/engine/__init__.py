"""The reference engine: KV caches of several kinds, masks, pool and scheduler that the model families run on."""

from .batch_cache import BatchKVCache
from .batch_masks import batch_mask
from .batch_paged import BatchPagedKVCache
from .batch_pool import BatchCache, BatchPool, join_caches
from .batch_rows import BatchLengths
from .blocks import BlockPool
from .cache_file import load_caches, save_caches
from .cache_spec import CacheKind, CacheSpec, cache_from_state, make_cache, make_caches
from .chunked import ChunkedKVCache
from .errors import CannotQuantise, CannotTrim
from .kv_cache import KVCache
from .masks import (
    CacheLengths,
    GivenMasks,
    MaskPolicy,
    causal_mask,
    chunk_mask,
    key_axis_before,
    mask_for,
    rotating_mask,
)
from .no_cache import NoCache, row_widths
from .paged import PagedKVCache
from .pool import CachePool, Owner, TrimReport, UnknownSequence
from .rotating import RotatingKVCache
from .scheduler import EnforceReport, Event, Forward, Generation, Scheduler, enforce_max_kv_size
from .storage import Storage, largest_error
from .visibility import VisibilityRule

__all__ = [
    "BatchCache",
    "BatchKVCache",
    "BatchLengths",
    "BatchPagedKVCache",
    "BatchPool",
    "BlockPool",
    "CacheKind",
    "CacheLengths",
    "CachePool",
    "CacheSpec",
    "CannotQuantise",
    "CannotTrim",
    "ChunkedKVCache",
    "EnforceReport",
    "Event",
    "Forward",
    "Generation",
    "GivenMasks",
    "KVCache",
    "MaskPolicy",
    "NoCache",
    "Owner",
    "PagedKVCache",
    "RotatingKVCache",
    "Scheduler",
    "Storage",
    "TrimReport",
    "UnknownSequence",
    "VisibilityRule",
    "batch_mask",
    "cache_from_state",
    "causal_mask",
    "chunk_mask",
    "enforce_max_kv_size",
    "join_caches",
    "key_axis_before",
    "largest_error",
    "load_caches",
    "make_cache",
    "make_caches",
    "mask_for",
    "rotating_mask",
    "row_widths",
    "save_caches",
]
