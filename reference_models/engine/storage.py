"""How cache rows are stored: as given, as int8 rows, or by MLX's affine quantisation; and what that can cost.

Everything here is about single rows, so what is stored does not depend on when, or beside what, a row was written.
"""

from typing import Literal, get_args

import mlx.core as mx

from .errors import CannotQuantise
from .int8 import INT8_MAX, dequantise_rows, quantise_rows

Storage = Literal["rows", "int8", "affine8", "affine4"]
"""``rows`` as given; ``int8``: see ``int8.py``; ``affine8``, ``affine4``: ``mx.quantize`` with 8 or 4 bits, in groups
of ``GROUP`` numbers of a row (packed uint32, and per group a scale and a bias in the dtype of the rows)."""

GROUP = 32
"""Numbers that share an affine scale."""

_BITS = {"affine8": 8, "affine4": 4}
#: Half an ulp: relative to a number, and of the smallest numbers.
_ROUNDING = {mx.float32: (2.0**-24, 0.0), mx.float16: (2.0**-11, 2.0**-25), mx.bfloat16: (2.0**-8, 0.0)}


def check_storage(storage: str) -> None:
    """Raise ValueError for an unknown storage."""
    if storage not in get_args(Storage):
        raise ValueError(f"unknown storage {storage!r}: expected one of {get_args(Storage)}")


def check_dim(storage: Storage, name: str, dim: int) -> None:
    """Raise CannotQuantise where rows of ``dim`` numbers cannot be stored so; ``name``: whose rows they are."""
    if storage in _BITS and dim % GROUP:
        raise CannotQuantise(f"{name} have D={dim}: {storage} needs a multiple of its group size {GROUP}")


def layout(storage: Storage, dim: int, dtype: mx.Dtype) -> list[tuple[int, mx.Dtype]]:
    """Width and dtype of every array that ``encode`` makes of rows ``[B, H, n, dim]`` of ``dtype``."""
    if storage == "rows":
        return [(dim, dtype)]
    if storage == "int8":
        return [(dim, mx.int8), (1, mx.float16)]
    return [(dim * _BITS[storage] // 32, mx.uint32), (dim // GROUP, dtype), (dim // GROUP, dtype)]


def dim_of(storage: Storage, width: int) -> int:
    """Numbers in a row whose first array has this width: inverse of ``layout``."""
    return width * 32 // _BITS[storage] if storage in _BITS else width


def encode(storage: Storage, rows: mx.array) -> list[mx.array]:
    """``rows [B, H, n, D]``, of a dtype and D that the storage takes, as they are stored: arrays ``[B, H, n, *]``."""
    if storage == "rows":
        return [rows]
    if storage == "int8":
        return list(quantise_rows(rows))
    if rows.size == 0:  # which mx.quantize does not take
        return [
            mx.zeros((*rows.shape[:3], width), dtype) for width, dtype in layout(storage, rows.shape[3], rows.dtype)
        ]
    return list(mx.quantize(rows, group_size=GROUP, bits=_BITS[storage]))


def decode(storage: Storage, arrays: list[mx.array], dtype: mx.Dtype) -> mx.array:
    """Inverse of ``encode``, up to ``largest_error``: ``[B, H, n, D]`` in ``dtype``, that of the rows."""
    if storage == "rows":
        return arrays[0]
    if storage == "int8":
        return dequantise_rows(arrays[0], arrays[1], dtype)
    packed, scales, biases = arrays
    if packed.size == 0:
        return mx.zeros((*packed.shape[:3], dim_of(storage, packed.shape[3])), dtype)
    return mx.dequantize(packed, scales, biases, group_size=GROUP, bits=_BITS[storage])


def largest_error(storage: Storage, rows: mx.array) -> mx.array:
    """How far ``decode(encode(rows))`` may lie from ``rows``, number by number: float32, the shape of ``rows``.

    Rounding to the nearest multiple of a step costs half a step; what lies beyond the last multiple is clipped and
    costs what it lies beyond.

    * ``rows``: nothing.
    * ``int8``: the step is ``absmax / 127``, rounded to fp16. A step rounded down ends below absmax:
      ``max(step / 2, |x| - 127 step)``. Where fp16 makes it 0, the row is stored as zeros and costs ``|x|``.
    * affine, ``n = 2**bits - 1``: the group ``[low, high]`` has a first step of ``s = (high - low) / n``, at least
      1e-7. MLX then moves it so that 0 and ``edge``, the end of larger magnitude, are stored exactly: the step becomes
      ``edge / round(edge / s)`` and steps are counted from ``edge``. With ``x = |edge| / s`` it lies between
      ``s x / (x + 1/2)`` and ``s x / (x - 1/2)``. The cost is ``max(step / 2, d - n step)`` of a number at distance d
      from ``edge``, the first with the largest, the second with the smallest step. So inside a group it is about half
      a step, and at the end that is not ``edge`` up to a whole one (x is n / 2 at least, so s n / (n + 1)).

    To that comes the rounding of what is computed: of the result to its dtype, and for affine of the scale (n times, as
    it is multiplied by up to n) and of the product, all by half an ulp of the dtype.

    Args:
        storage: any.
        rows: ``[.., D]``, finite; for int8 of a magnitude below 8.3e6 (see ``int8.quantise_rows``).
    """
    if storage == "rows":
        return mx.zeros(rows.shape, mx.float32)
    ulp, smallest = _ROUNDING[rows.dtype]
    wide = rows.astype(mx.float32)
    if storage == "int8":
        step = (mx.max(mx.abs(wide), axis=-1, keepdims=True) / INT8_MAX).astype(mx.float16).astype(mx.float32)
        cost = mx.where(step == 0, mx.abs(wide), mx.maximum(step / 2, mx.abs(wide) - INT8_MAX * step))
        # The last: float32 computes the quotient that is rounded, and may take the other neighbour of a tie.
        return cost + (ulp + 2.0**-22) * (mx.abs(wide) + cost) + smallest
    n = 2 ** _BITS[storage] - 1
    group = wide.reshape(*wide.shape[:-1], -1, GROUP)
    low, high = mx.min(group, axis=-1, keepdims=True), mx.max(group, axis=-1, keepdims=True)
    edge = mx.where(mx.abs(low) > mx.abs(high), low, high)
    first = mx.maximum((high - low) / n, 1e-7)
    x = mx.abs(edge) / first
    # Below x = 1, only where 1e-7 decides, edge may count 0 or 1 steps; so the step is first, or edge itself.
    largest = mx.maximum(first, mx.abs(edge) / mx.maximum(x - 0.5, 1.0))
    least = first * x / (x + 0.5)
    cost = mx.maximum(largest / 2, mx.abs(group - edge) - n * least)
    cost = mx.where(x < 0.51, mx.maximum(first / 2, mx.abs(group)), cost)
    computed = 4 * ulp * (mx.abs(edge) + n * largest) + (n + 1) * smallest
    bound: mx.array = cost * (1 + 2.0**-20) + computed
    return bound.reshape(rows.shape)
