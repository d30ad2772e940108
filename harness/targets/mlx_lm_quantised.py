"""Caches of mlx-lm that hold quantised rows, made as generation makes them with ``kv_bits``: by the library's own
``maybe_quantize_kv_cache``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from harness.quantised import BITS
from harness.rules import GROUP, fits
from harness.target import CacheRows


class CannotQuantise(Exception):
    """The library left the caches as they were."""


def storage_of(caches: Sequence[Any]) -> str:
    """``rows``, or what the caches of a sequence are quantised to."""
    bits = next((cache.bits for cache in caches if hasattr(cache, "bits")), None)
    return next((name for name, count in BITS.items() if count == bits), "rows")


def quantise(caches: list[Any], storage: str) -> None:
    """In place, in groups of GROUP numbers. CannotQuantise where the library does nothing; what else it raises is an
    error of the operation."""
    before = list(caches)
    importlib.import_module("mlx_lm.generate").maybe_quantize_kv_cache(caches, 0, GROUP, BITS[storage])
    if all(old is new for old, new in zip(before, caches, strict=True)):
        raise CannotQuantise(f"maybe_quantize_kv_cache did nothing: the caches store {storage_of(before)}")


def widths(model: Any, make: Callable[[], list[Any]]) -> list[tuple[int, int]]:
    """Numbers in a row of keys and of values of every cache."""
    caches = make()
    mx.eval(model(mx.array([[1, 2]]), cache=caches))
    return [(cache.keys.shape[-1], cache.values.shape[-1]) for cache in caches]


def fit(model: Any, make: Callable[[], list[Any]]) -> bool:
    """Are rows of all its caches whole groups?"""
    return all(fits("affine8", width) for both in widths(model, make) for width in both)


def read(cache: Any, count: int) -> tuple[mx.array, mx.array]:
    """The first ``count`` rows of keys and of values as attention multiplies them."""
    keys, values = ([part[..., :count, :] for part in side] for side in (cache.keys, cache.values))
    return _numbers(keys, cache.group_size, cache.bits), _numbers(values, cache.group_size, cache.bits)


def _numbers(parts: Sequence[mx.array], group: int, bits: int) -> mx.array:
    packed, scales, biases = parts
    return mx.dequantize(packed, scales, biases, group_size=group, bits=bits)


def read_back(rows: mx.array, storage: str) -> mx.array:
    """Rows as they come out of such a cache."""
    return _numbers(mx.quantize(rows, group_size=GROUP, bits=BITS[storage]), GROUP, BITS[storage])


def told(given: Sequence[tuple[mx.array, mx.array]]) -> tuple[CacheRows, ...]:
    """As a ForwardObservation has them."""
    rows = [[np.array(side.astype(mx.float32)) for side in sides] for sides in given]
    return tuple(CacheRows(keys, values) for keys, values in rows)
