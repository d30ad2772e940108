"""What quantised caches were given, how far what they hold may lie from it, and how many bytes they may take for it.

The bounds are written from the definitions of the storages and share no code with any engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from harness.rules import GROUP, fits_all
from harness.target import CacheRows, Capability, Target

Array = np.ndarray[Any, Any]

INT8_MAX = 127
BITS = {"affine8": 8, "affine4": 4}
#: Half an ulp of float32, in which targets compute; and how far a quotient may be off before it is rounded.
_ULP, _QUOTIENT = 2.0**-24, 2.0**-21


def takes_affine(target: Target) -> bool:
    """Can caches of this target, as they are at first, be quantised to any storage there is? Rows of most tiny models
    are too narrow for the affine ones."""
    quantises = Capability.QUANTISE in target.capabilities and target.row_storage == "rows"
    return quantises and fits_all(target.row_widths)


class GivenRows:
    """The rows that caches were given, by layer (counted over the caches) and by the number of their token."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], tuple[Array, Array]] = {}

    def take(self, numbers: Sequence[int], positions: Sequence[int], layers: Sequence[CacheRows]) -> None:
        """Rows of every layer, of tokens with these numbers at these positions, or of those that the rows name."""
        number_of = dict(zip(positions, numbers, strict=True))
        for layer, rows in enumerate(layers):
            for at, position in enumerate(positions if rows.positions is None else rows.positions):
                if at < rows.keys.shape[2] and position in number_of:
                    self._rows[layer, number_of[position]] = rows.keys[0, :, at], rows.values[0, :, at]

    def of(self, layer: int, numbers: Sequence[int]) -> tuple[list[int], Array, Array]:
        """Which of the numbers are known, as indices, and the keys and values of those, [1, H, n, D]."""
        known = [at for at, number in enumerate(numbers) if (layer, number) in self._rows]
        rows = [self._rows[layer, numbers[at]] for at in known]
        keys, values = (np.stack([pair[side] for pair in rows], 1)[None] if rows else np.zeros(0) for side in (0, 1))
        return known, keys, values


def largest_error(storage: str, rows: Array) -> Array:
    """How far a row read back may lie from ``rows`` [.., D] as they were given, number by number, float64.

    Half a step, and for what lies beyond the last step what it lies beyond. ``int8``: the step is ``absmax / 127`` in
    fp16. Affine: a step of ``(high - low) / (2**bits - 1)`` is moved so that 0 lies on one of the steps, counted from
    the end of the larger magnitude. A step that may have been rounded either way counts with its larger cost.
    """
    x = rows.astype(np.float64)
    if storage == "rows":
        return np.zeros(x.shape)
    cost = _int8(x) if storage == "int8" else _affine(x, 2 ** BITS[storage] - 1)
    magnitude = np.abs(x).max(axis=-1, keepdims=True)
    bound: Array = cost * (1 + 1e-6) + 8 * _ULP * (magnitude + cost)
    return bound


def _int8(x: Array) -> Array:
    exact = np.abs(x).max(axis=-1, keepdims=True) / INT8_MAX
    costs = []
    for off in (-_QUOTIENT, _QUOTIENT):
        step = (exact * (1 + off)).astype(np.float16).astype(np.float64)
        costs.append(np.where(step == 0, np.abs(x), np.maximum(step / 2, np.abs(x) - INT8_MAX * step)))
    return np.maximum(*costs)


def _affine(x: Array, steps: int) -> Array:
    group = x.reshape(*x.shape[:-1], -1, GROUP)
    low, high = group.min(axis=-1, keepdims=True), group.max(axis=-1, keepdims=True)
    edge = np.where(np.abs(low) > np.abs(high), low, high)
    first = np.maximum((high - low) / steps, 1e-7)
    costs = []
    for off in (-_QUOTIENT, _QUOTIENT):
        count = np.rint(np.abs(edge) / first * (1 + off))
        step = np.where(count == 0, first, np.abs(edge) / np.maximum(count, 1))
        start = np.where(count == 0, 0.0, edge)
        costs.append(np.maximum(step / 2, np.abs(group - start) - steps * step))
    worst: Array = np.maximum(*costs).reshape(x.shape)
    return worst


def bytes_of_a_row(storage: str, width: int) -> int:
    """Bytes that a row of ``width`` numbers takes at most: numbers, scales and biases of up to four bytes."""
    if storage == "int8":
        return width + 2
    return width * BITS[storage] // 8 + width // GROUP * 2 * 4 if storage in BITS else width * 4
