"""What a cache is made of as a value, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from reference_models.engine import (
    CacheSpec,
    ChunkedKVCache,
    KVCache,
    PagedKVCache,
    RotatingKVCache,
    load_caches,
    make_cache,
    make_caches,
    save_caches,
)
from tests.reference_models.engine.held import told

SPECS = [
    CacheSpec(),
    CacheSpec(storage="affine4"),
    CacheSpec("rotating"),
    CacheSpec("rotating", window=4),
    CacheSpec("rotating", "int8", window=4, sinks=3),
    CacheSpec("rotating", sinks=2),
    CacheSpec("chunked", chunk=3),
    CacheSpec("chunked", "affine8", chunk=3),
    CacheSpec("paged", block=4),
    CacheSpec("paged", "affine4", block=16),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_spec_goes_through_json(spec: CacheSpec) -> None:
    said = spec.to_json()
    assert CacheSpec.from_json(json.loads(json.dumps(said))) == spec
    assert said["kind"] == spec.kind and hash(spec) == hash(CacheSpec(**said))
    assert "sinks" not in said or spec.sinks


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"kind": "ring"}, "unknown kind 'ring'"),
        ({"kind": ["dense"]}, "unknown kind"),
        ({"storage": "int4"}, "unknown storage 'int4'"),
        ({"window": 4}, "window .4. says nothing of a dense cache"),
        ({"kind": "chunked", "chunk": 3, "window": 3}, "window .3. says nothing of a chunked cache"),
        ({"kind": "chunked"}, "chunk is missing"),
        ({"kind": "chunked", "chunk": 0}, "chunk 0"),
        ({"kind": "paged"}, "block is missing"),
        ({"kind": "paged", "block": 0}, "block 0"),
        ({"kind": "paged", "block": 4, "window": 4}, "window .4. says nothing of a paged cache"),
        ({"kind": "rotating", "window": 0}, "window 0"),
        ({"kind": "rotating", "window": 2.0}, "window must be a whole number, got 2.0"),
        ({"kind": "rotating", "window": True}, "window must be a whole number, got True"),
        ({"kind": "rotating", "window": 4, "sinks": 4}, "sinks 4"),
        ({"kind": "rotating", "sinks": -1}, "sinks -1"),
        ({"kind": "rotating", "window": 4, "sinks": "2"}, "sinks must be a whole number"),
        ({"kind": "rotating", "window": 4, "chunk": 4}, "chunk .4. says nothing of a rotating cache"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        CacheSpec(**fields)
    with pytest.raises(ValueError, match=match):
        CacheSpec.from_json({"kind": "dense"} | fields)


@pytest.mark.parametrize("data", [None, [], "dense", {}, {"storage": "rows"}, {"kind": "dense", "size": 3}])
def test_json_that_is_no_spec_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="a cache must be an object with kind"):
        CacheSpec.from_json(data)


def test_make_cache_makes_what_was_said() -> None:
    assert type(make_cache()) is KVCache and make_cache("int8").storage == "int8"
    ring = make_cache(SPECS[4])
    assert isinstance(ring, RotatingKVCache) and (ring.window, ring.sinks, ring.storage) == (4, 3, "int8")
    chunked = make_cache(SPECS[7], window=9)
    assert isinstance(chunked, ChunkedKVCache) and (chunked.chunk, chunked.storage) == (3, "affine8")
    paged, other = make_cache(SPECS[8]), make_cache(SPECS[8])
    assert isinstance(paged, PagedKVCache) and isinstance(other, PagedKVCache)
    assert (paged.pool.block, paged.storage) == (4, "rows") and paged.pool is not other.pool
    with pytest.raises(ValueError, match="unknown storage"):
        make_cache("int4")  # type: ignore[arg-type]


def test_a_rotating_cache_takes_the_window_of_its_layer_unless_it_has_one() -> None:
    def windows(spec: CacheSpec, layers: list[int | None]) -> list[int | None]:
        return [cache.window if isinstance(cache, RotatingKVCache) else None for cache in make_caches(spec, layers)]

    assert windows(CacheSpec("rotating"), [None, 3, 5]) == [None, 3, 5]
    assert windows(CacheSpec("rotating", window=4), [None, 3, 5]) == [4, 4, 4]
    assert windows(CacheSpec(), [None, 3]) == [None, None]
    with pytest.raises(ValueError, match="window is missing"):
        make_caches(CacheSpec("rotating"), [None, None])
    with pytest.raises(ValueError, match="sinks 3"):
        make_caches(CacheSpec("rotating", sinks=3), [None, 3])


def test_a_file_holds_caches_of_every_kind(tmp_path: Path) -> None:
    caches = [make_cache(spec) for spec in SPECS]
    for cache in caches:
        for n in (4, 1, 1, 1, 2, 1, 1):
            cache.update_and_fetch(mx.full((1, 2, n, 32), n / 2), mx.full((1, 1, n, 64), n / 4))
    save_caches(tmp_path / "all.safetensors", caches)
    loaded = load_caches(tmp_path / "all.safetensors")
    assert [type(cache) for cache in loaded] == [type(cache) for cache in caches]
    for one, other in zip(loaded, caches, strict=True):
        assert told(one) == told(other) and one.rule == other.rule
        for cache in (one, other):
            cache.update_and_fetch(mx.ones((1, 2, 1, 32)), mx.ones((1, 1, 1, 64)))
        assert told(one) == told(other)


def test_an_unknown_kind_in_a_file_is_refused(tmp_path: Path) -> None:
    described = json.dumps([KVCache().state()[1] | {"kind": "ring"}])
    mx.save_safetensors(str(tmp_path / "c.safetensors"), {"a": mx.zeros((1,))}, {"caches": described})
    with pytest.raises(ValueError, match="unknown kind of cache 'ring'"):
        load_caches(tmp_path / "c.safetensors")
