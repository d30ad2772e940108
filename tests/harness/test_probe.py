"""The probe: attention and RoPE of small hand-written MLX functions."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn

from harness.probe import Probe, Record
from harness.target import AttentionCall

ATTENTION, ROPE, SOFTMAX, QMM = (
    mx.fast.scaled_dot_product_attention,
    mx.fast.rope,
    mx.softmax,
    mx.quantized_matmul,
)
INF = float("inf")


def qkv(l: int = 3, keys: int = 5, heads: int = 4, kv_heads: int = 2, dim: int = 8, batch: int = 1) -> list[mx.array]:
    return [mx.random.normal((batch, h, n, dim)) for h, n in ((heads, l), (kv_heads, keys), (kv_heads, keys))]


def causal(l: int, keys: int) -> np.ndarray[Any, Any]:
    return np.arange(keys)[None] <= np.arange(keys - l, keys)[:, None]


def sdpa(mask: Any, l: int = 3, keys: int = 5, batch: int = 1) -> AttentionCall:
    """The one call of a forward with that mask."""
    q, k, v = qkv(l, keys, batch=batch)
    with Probe().watching() as record:
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask))
    (call,) = record.attention()
    return call


def untouched() -> bool:
    return (mx.fast.scaled_dot_product_attention, mx.fast.rope, mx.softmax, mx.quantized_matmul) == (
        ATTENTION,
        ROPE,
        SOFTMAX,
        QMM,
    )


@pytest.fixture(autouse=True)
def _nothing_stays_wrapped() -> Iterator[None]:
    assert untouched()
    yield
    assert untouched()


def test_lengths_and_heads_of_a_fast_call() -> None:
    call = sdpa(None)
    assert (call.kind, call.query_len, call.key_len, call.value_len, call.heads, call.kv_heads) == (
        ("fast", 3, 5, 5, 4, 2)
    )
    assert (call.mask, call.mask_shape, call.shown, call.mask_keys, call.scores) == ("none", None, None, None, False)


def test_the_causal_string_is_no_explicit_mask() -> None:
    call = sdpa("causal")
    assert (call.mask, call.mask_shape, call.shown, call.mask_keys) == ("causal", None, None, None)


@pytest.mark.parametrize("axes", [(), (None,), (None, None)], ids=["2 axes", "3 axes", "4 axes"])
@pytest.mark.parametrize("low", ["bool", -INF, -1e9, -65504.0, -1e4, "bf16", "fp16"])
def test_what_a_mask_shows(axes: tuple[None, ...], low: Any) -> None:
    shown = causal(3, 5)
    mask = mx.array(shown)[axes]
    if low == "bf16":
        mask = mx.where(mask, 0.0, mx.finfo(mx.bfloat16).min).astype(mx.bfloat16).astype(mx.float32)
    elif low == "fp16":
        mask = mx.where(mask, 0.0, -65504.0).astype(mx.float16).astype(mx.float32)
    elif low != "bool":
        mask = mx.where(mask, 0.0, low)
    call = sdpa(mask)
    assert call.mask == ("bool" if low == "bool" else "additive")
    assert call.mask_shape == (1,) * len(axes) + (3, 5) and call.mask_keys == 5
    assert call.shown is not None and call.shown.dtype == bool and call.shown.shape == (1, 1, 3, 5)
    assert np.array_equal(call.shown[0, 0], shown) and not call.scores


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_an_additive_mask_in_half_precision(dtype: mx.Dtype) -> None:
    q, k, v = (array.astype(dtype) for array in qkv())
    mask = mx.where(mx.array(causal(3, 5)), 0, mx.finfo(dtype).min).astype(dtype)
    with Probe().watching() as record:
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask))
    (call,) = record.attention()
    assert call.shown is not None and np.array_equal(call.shown[0, 0], causal(3, 5))


def test_a_mask_of_every_batch_row_and_head() -> None:
    shown = np.stack([causal(3, 5)] * 8).reshape(2, 4, 3, 5)
    shown[1, 2, 0, 0] = False
    call = sdpa(mx.array(shown), batch=2)
    assert call.shown is not None and np.array_equal(call.shown, shown)


def test_masks_that_broadcast() -> None:
    row = sdpa(mx.array([[True, True, True, False, True]]))
    assert row.mask_keys == 5 and row.shown is not None and row.shown.shape == (1, 1, 1, 5)
    key = sdpa(mx.array([[True], [True], [True]]))
    assert key.mask_keys is None and key.mask_shape == (3, 1)  # fits keys of any number: nothing to hold it to
    one = sdpa(mx.array([[True]]), l=1, keys=1)
    assert one.mask_keys == 1


def test_a_mask_that_does_not_fit_is_seen_before_it_raises() -> None:
    probe = Probe()
    q, k, v = qkv(4, 10)
    with probe.watching() as record, pytest.raises(ValueError, match="broadcast"):
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mx.ones((4, 14), mx.bool_)))
    (call,) = record.attention()
    assert (call.mask_keys, call.key_len) == (14, 10)


def test_scores_of_an_mla_decode_are_no_mask() -> None:
    """The rotated part of an MLA decode is added as dense scores [B, H, 1, K]."""
    call = sdpa(mx.random.normal((1, 4, 1, 5)), l=1)
    assert call.mask == "additive" and call.scores and call.mask_keys == 5
    hiding = mx.where(mx.array([True, False, True, True, True]), mx.random.normal((1, 4, 1, 5)), -INF)
    call = sdpa(hiding, l=1)
    assert (
        not call.scores and call.shown is not None and call.shown[0, 0, 0].tolist() == [True, False, True, True, True]
    )
    assert not sdpa(mx.zeros((1, 4, 1, 5)), l=1).scores


def by_hand(mask: mx.array | None, q: mx.array, k: mx.array, v: mx.array) -> mx.array:
    scores = (q * 0.3) @ k.swapaxes(-1, -2)
    if mask is not None:
        low = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, low) if mask.dtype == mx.bool_ else scores + mask
    return mx.softmax(scores, axis=-1, precise=True) @ v


@pytest.mark.parametrize("low", ["bool", -INF, -1e9, -1e4])
@pytest.mark.parametrize("grouped", [False, True])
def test_attention_by_hand(low: Any, grouped: bool) -> None:
    shown = causal(3, 5)
    q, k, v = qkv(3, 5, heads=4, kv_heads=2 if grouped else 4)
    if grouped:
        q, k, v = q.reshape(1, 2, 2, 3, 8), k[:, :, None], v[:, :, None]
    mask = mx.array(shown) if low == "bool" else mx.where(mx.array(shown), 0.0, low)
    with Probe().watching() as record:
        mx.eval(by_hand(mask, 9 * q, k, v))  # large scores, also where one is added to -1e4
    (call,) = record.attention()
    assert (call.kind, call.query_len, call.key_len, call.heads) == ("softmax", 3, 5, 4)
    assert call.kv_heads == (2 if grouped else 4)
    assert call.shown is not None and call.shown.shape == (1, 4, 3, 5)
    assert (call.shown == shown).all() and not call.scores


def test_one_token_by_hand_proves_nothing() -> None:
    with Probe().watching() as record:
        mx.eval(by_hand(None, *qkv(1, 5, 4, 4)))
    (call,) = record.attention()
    assert call.scores and call.shown is not None and call.shown.all()


@pytest.mark.parametrize("heads", [2, 4], ids=["plain", "grouped, 5 axes"])
def test_quantised_attention(heads: int) -> None:
    q, k, v = qkv(3, 6, heads, 2, dim=32)
    keys, values = (mx.quantize(x, group_size=32, bits=8) for x in (k, v))
    if heads == 4:
        q = q.reshape(1, 2, 2, 3, 32)
        keys, values = (tuple(part[:, :, None] for part in side) for side in (keys, values))
    with Probe().watching() as record:
        scores = mx.quantized_matmul(q, *keys, transpose=True, group_size=32, bits=8)
        weights = mx.softmax(mx.where(mx.array(causal(3, 6)), scores, mx.finfo(mx.float32).min), axis=-1)
        mx.eval(mx.quantized_matmul(weights, *values, transpose=False, group_size=32, bits=8))
        by_hand(None, *qkv(3, 6, 4, 4))  # not quantised, with as many keys
    call, plain = record.attention()
    assert plain.kind == "softmax"
    assert (call.kind, call.key_len, call.heads, call.kv_heads) == ("quantised", 6, heads, 2)
    assert call.shown is not None and (call.shown == causal(3, 6)).all()


def test_a_softmax_over_something_else_is_no_attention() -> None:
    with Probe().watching() as record:
        mx.softmax(mx.zeros((1, 7, 8)), axis=-1)  # a router: [B, L, experts]
        mx.softmax(mx.zeros((7, 8)))
        mx.softmax(mx.zeros((1, 2, 3, 4)), axis=1)
        mx.softmax(mx.zeros((1, 2, 3, 4)))  # over everything
        nn.softmax(mx.zeros((1, 7, 8)))
    assert record.attention() == ()


def test_a_quantised_linear_layer_does_not_make_attention_quantised() -> None:
    layer = nn.QuantizedLinear(32, 32, group_size=32)
    with Probe().watching() as record:
        layer(mx.zeros((1, 3, 32)))
        by_hand(None, *qkv(3, 32, 4, 4))
    assert [call.kind for call in record.attention()] == ["softmax"]


def rotate(x: mx.array, offset: Any, **named: Any) -> mx.array:
    return mx.fast.rope(x, 8, traditional=False, base=10000.0, scale=1.0, offset=offset, **named)


def positions(record: Record) -> list[tuple[str, Any]]:
    return [(call.kind, call.positions.tolist()) for call in record.positions()]


def test_rope_with_a_number_and_with_a_vector() -> None:
    with Probe().watching() as record:
        rotate(mx.zeros((1, 2, 3, 8)), 7)
        rotate(mx.zeros((2, 2, 3, 8)), mx.array([4, 9]))
        rotate(mx.zeros((1, 2, 2, 8)), mx.array(5))
        rotate(mx.zeros((1, 2, 8)), 0)
        nn.RoPE(8)(mx.zeros((1, 2, 2, 8)), offset=3)
    assert positions(record) == [
        ("rope", [7, 8, 9]),
        ("rope", [[4, 5, 6], [9, 10, 11]]),
        ("rope", [[5, 6]]),
        ("rope", [0, 1]),
        ("rope", [3, 4]),
    ]


def test_the_probe_changes_no_number() -> None:
    q, k, v = qkv()
    mask = mx.array(causal(3, 5))

    def forward() -> list[mx.array]:
        fast = mx.fast.scaled_dot_product_attention(rotate(q, 7), k, v, scale=0.3, mask=mask)
        return [fast, by_hand(mask, q[:, :2], k, v)]

    plain = forward()
    with Probe().watching():
        watched = forward()
    assert all(bool(mx.array_equal(a, b)) for a, b in zip(plain, watched, strict=True))
    assert math.isfinite(float(plain[0].sum()))


def test_aliases_in_other_modules_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("synthetic_model")
    module.rope, module.attend, module.soft, module.qmm = ROPE, ATTENTION, SOFTMAX, QMM
    monkeypatch.setitem(sys.modules, "synthetic_model", module)
    probe = Probe()
    q, k, v = qkv(dim=32)
    with probe.watching() as record:
        module.rope(q, 32, traditional=False, base=1e4, scale=1.0, offset=2)
        module.attend(q, k, v, scale=1.0)
        module.qmm(q[:, :2], *mx.quantize(k, group_size=32, bits=8), transpose=True, group_size=32, bits=8)
        module.soft(mx.zeros((1, 2, 3, 5)), axis=-1)
    assert [call.kind for call in record.attention()] == ["fast", "quantised"]
    assert positions(record) == [("rope", [2, 3, 4])]
    assert (module.rope, module.attend, module.soft, module.qmm) == (ROPE, ATTENTION, SOFTMAX, QMM)
