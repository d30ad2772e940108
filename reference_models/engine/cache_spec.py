"""Which kind of cache: a value that can be written down, and the caches made of it."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

import mlx.core as mx

from .blocks import BlockPool
from .chunked import ChunkedKVCache
from .kv_cache import KVCache
from .paged import PagedKVCache
from .rotating import RotatingKVCache
from .storage import Storage, check_storage
from .visibility import VisibilityRule

CacheKind = Literal["dense", "rotating", "chunked", "paged"]

KINDS: Mapping[CacheKind, type[KVCache]] = {
    "dense": KVCache,
    "rotating": RotatingKVCache,
    "chunked": ChunkedKVCache,
    "paged": PagedKVCache,
}
#: The fields that say something of a kind; the others must be left as they are.
_FIELDS: Mapping[CacheKind, tuple[str, ...]] = {
    "dense": (),
    "rotating": ("window", "sinks"),
    "chunked": ("chunk",),
    "paged": ("block",),
}


@dataclass(frozen=True)
class CacheSpec:
    """A kind of cache and its sizes, in tokens. Raises ValueError, naming the field, for what does not fit together.

    Attributes:
        kind: see the classes in ``KINDS``.
        storage: of its rows.
        window: of a rotating cache; None for the sliding window of the layer, and a dense cache where it has none.
        sinks: of a rotating cache, fewer than its window.
        chunk: of a chunked cache.
        block: of a paged cache.
    """

    kind: CacheKind = "dense"
    storage: Storage = "rows"
    window: int | None = None
    sinks: int = 0
    chunk: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CacheKind):
            raise ValueError(f"unknown kind {self.kind!r}: expected one of {get_args(CacheKind)}")
        check_storage(self.storage)
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default and field.name not in _FIELDS[self.kind]:
                raise ValueError(f"{field.name} ({value!r}) says nothing of a {self.kind} cache")
            if type(value) is not int and value != field.default:
                raise ValueError(f"{field.name} must be a whole number, got {value!r:.60}")
        for name in set(_FIELDS[self.kind]) & {"chunk", "block"}:
            if getattr(self, name) is None:
                raise ValueError(f"{name} is missing: a {self.kind} cache needs it")
        if self.sinks < 0:
            raise ValueError(f"sinks must be >= 0, got sinks {self.sinks}")
        if self.window is not None or self.chunk is not None:
            VisibilityRule(self.window, self.sinks, self.chunk)
        if self.block is not None:
            BlockPool(self.block)

    def to_json(self) -> dict[str, Any]:
        """All that differs from the default, and the kind."""
        said = asdict(self)
        return {
            field.name: said[field.name]
            for field in fields(self)
            if field.name == "kind" or said[field.name] != field.default
        }

    @classmethod
    def from_json(cls, data: object) -> "CacheSpec":
        """Inverse of ``to_json``. Raises ValueError with one line."""
        known = [field.name for field in fields(cls)]
        if not isinstance(data, dict) or "kind" not in data or set(data) - set(known):
            raise ValueError(f"a cache must be an object with kind, and of {', '.join(known[1:])} what is needed")
        return cls(**data)


def make_cache(spec: Storage | CacheSpec = "rows", window: int | None = None) -> KVCache:
    """An empty cache; a storage alone means a dense one; a paged one has a pool of its own.

    ``window``: sliding window of the layer, None without one.
    """
    spec = spec if isinstance(spec, CacheSpec) else CacheSpec(storage=spec)
    window = spec.window or window
    if spec.kind == "rotating" and window is not None:
        return RotatingKVCache(window, spec.sinks, spec.storage)
    if spec.kind == "chunked" and spec.chunk is not None:
        return ChunkedKVCache(spec.chunk, spec.storage)
    if spec.kind == "paged" and spec.block is not None:
        return PagedKVCache(BlockPool(spec.block, spec.storage))
    return KVCache(spec.storage)


def make_caches(spec: Storage | CacheSpec, windows: Sequence[int | None]) -> list[KVCache]:
    """Empty caches for layers with these sliding windows.

    Raises ValueError where a rotating cache should take the window of its layer and no layer has one: nothing would
    ever rotate.
    """
    if isinstance(spec, CacheSpec) and spec.kind == "rotating" and spec.window is None and not any(windows):
        raise ValueError("window is missing: no layer of this model has one that a rotating cache could take")
    return [make_cache(spec, window) for window in windows]


def cache_from_state(arrays: dict[str, mx.array], metadata: dict[str, Any]) -> KVCache:
    """Inverse of ``state`` for every kind of cache. Raises ValueError where these do not belong together."""
    kind = metadata.get("kind", "dense")
    if kind not in KINDS:
        raise ValueError(f"unknown kind of cache {kind!r:.60}: expected one of {', '.join(KINDS)}")
    return KINDS[kind].from_state(arrays, metadata)
