"""Bugs of the attention kernel itself, whatever it is given."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing

_FLOAT64 = "attention_equals_float64"


def _scale_off(original: Any) -> Any:
    def attention(q: mx.array, k: mx.array, v: mx.array, *args: Any, scale: float, **kwargs: Any) -> Any:
        return original(q, k, v, *args, scale=scale * (0.9 if k.shape[-2] > 8 else 1), **kwargs)

    return attention


def _last_value_of_a_block(original: Any) -> Any:
    def attention(q: mx.array, k: mx.array, v: mx.array, *args: Any, **kwargs: Any) -> Any:
        if v.shape[-2] % 4 == 0:
            v = mx.concatenate([v[..., :-1, :], v[..., -2:-1, :]], axis=-2)
        return original(q, k, v, *args, **kwargs)

    return attention


FAULTS: tuple[Fault, ...] = (
    Fault(
        "kernel-scales-long-keys-otherwise",
        "attention over more than 8 keys multiplies scores by another number",
        _FLOAT64,
        replacing(mx.fast, "scaled_dot_product_attention", _scale_off),
        source="pytorch/pytorch#162588 (wrong results at large lengths alone)",
        layer="attention",
    ),
    Fault(
        "kernel-reads-a-value-twice",
        "where the keys fill a block of 4, attention takes the last but one value in the place of the last",
        _FLOAT64,
        replacing(mx.fast, "scaled_dot_product_attention", _last_value_of_a_block),
        source="pytorch/pytorch#169222 (rows of the last, partial block of keys)",
        layer="attention",
    ),
)
