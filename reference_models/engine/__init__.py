"""The reference engine: KV cache, masks, pool and scheduler that the model families run on."""

from .batch_cache import BatchKVCache
from .batch_masks import batch_mask
from .batch_pool import BatchPool
from .batch_rows import BatchLengths
from .cache_file import load_caches, save_caches
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
from .no_cache import NoCache
from .pool import CachePool, Owner, TrimReport, UnknownSequence
from .scheduler import EnforceReport, Event, Forward, Generation, Scheduler, enforce_max_kv_size
from .side import Storage

__all__ = [
    "BatchKVCache",
    "BatchLengths",
    "BatchPool",
    "CacheLengths",
    "CachePool",
    "EnforceReport",
    "Event",
    "Forward",
    "Generation",
    "GivenMasks",
    "KVCache",
    "MaskPolicy",
    "NoCache",
    "Owner",
    "Scheduler",
    "Storage",
    "TrimReport",
    "UnknownSequence",
    "batch_mask",
    "causal_mask",
    "chunk_mask",
    "enforce_max_kv_size",
    "key_axis_before",
    "load_caches",
    "mask_for",
    "rotating_mask",
    "save_caches",
]
