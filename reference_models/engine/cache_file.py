"""Caches in a safetensors file, and back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from .batch_cache import BatchKVCache
from .cache_spec import cache_from_state
from .kv_cache import KVCache

_KEY = "caches"  # of the metadata of the file: a JSON list, one object per cache


def save_caches(path: Path, caches: Sequence[KVCache | BatchKVCache]) -> None:
    """Write caches to ``path`` (ending in ``.safetensors``): arrays ``<number>.keys.0`` and so on, the rest as JSON in
    the metadata of the file."""
    arrays: dict[str, mx.array] = {}
    described = []
    for number, cache in enumerate(caches):
        live, metadata = cache.state()
        arrays |= {f"{number}.{name}": array for name, array in live.items()}
        described.append(metadata)
    mx.save_safetensors(str(path), arrays, {_KEY: json.dumps(described)})


def load_caches(path: Path) -> list[Any]:
    """Read what ``save_caches`` wrote, each cache as what it was; the file is no longer needed afterwards.

    Raises ValueError for a file that was not written by it.
    """
    loaded: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = loaded
    if _KEY not in metadata:
        raise ValueError(f"{path} holds no caches: its metadata has no {_KEY!r}")
    caches: list[Any] = []
    for number, described in enumerate(json.loads(metadata[_KEY])):
        prefix = f"{number}."
        mine = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
        make = BatchKVCache.from_state if described.get("kind") == "batch" else cache_from_state
        caches.append(make(mine, described))
    return caches
