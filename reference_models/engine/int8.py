"""Symmetric int8 storage of cache rows: one fp16 scale per (batch, head, token)."""

import mlx.core as mx

INT8_MAX = 127


def quantise_rows(rows: mx.array) -> tuple[mx.array, mx.array]:
    """Quantise each row (last axis) on its own.

    Args:
        rows: float16, bfloat16 or float32, ``[B, H, n, D]`` with ``D >= 1``, finite.

    Returns:
        ``(q, scales)``: int8 ``[B, H, n, D]`` and float16 ``[B, H, n, 1]``, in the unit of ``rows``.
        ``scale = absmax / 127`` and ``q = clip(round(row / scale), -128, 127)``. A row whose absmax is
        above about 8.3e6 overflows the fp16 scale and does not survive (it reads back as NaN).
    """
    wide = rows.astype(mx.float32)
    scales = (mx.max(mx.abs(wide), axis=-1, keepdims=True) / INT8_MAX).astype(mx.float16)
    # Tested after the cast: absmax / 127 of a tiny row is positive in fp32 and zero in fp16.
    scales = mx.where(scales == 0, mx.ones_like(scales), scales)
    # Divide by the scale as stored, not by the exact one: the fetch multiplies by the stored one.
    q = mx.clip(mx.round(wide / scales.astype(mx.float32)), -INT8_MAX - 1, INT8_MAX)
    return q.astype(mx.int8), scales


def dequantise_rows(q: mx.array, scales: mx.array, dtype: mx.Dtype) -> mx.array:
    """Return ``q * scales`` in ``dtype``.

    Args:
        q: int8 ``[B, H, n, D]``.
        scales: float16 ``[B, H, n, 1]``.
        dtype: dtype of the rows before they were quantised.

    Returns:
        ``[B, H, n, D]``. With float16 the single magnitude 65504 (the largest finite one) may read back
        as infinity, because its scale rounds up.
    """
    # In fp32: a product formed in fp16 or bfloat16 would be rounded twice.
    return (q.astype(mx.float32) * scales.astype(mx.float32)).astype(dtype)
