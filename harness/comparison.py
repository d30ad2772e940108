"""The one place that compares numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

RECUT = {"rows": 1e-4, "int8": 5e-2}
"""How far logits may differ when the same tokens are cut into other forwards, by cache storage, in deviations of the
logits. Sums are taken in another order then; in Int8 storage a difference in the last bit can move a number by a whole
quantisation step (1/127 of the largest of its row)."""


def recut_tolerance(storage: str) -> float:
    """Of this storage; of an unknown one the widest."""
    return RECUT.get(storage, max(RECUT.values()))


def distance(left: Array, right: Array) -> float:
    """The largest absolute difference in deviations of ``right`` (1 where that is less); inf where one has a nan or an
    infinity that the other has not. Shapes must agree (ValueError)."""
    if left.shape != right.shape:
        raise ValueError(f"cannot compare {list(left.shape)} with {list(right.shape)}")
    a, b = left.astype(np.float64), right.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    if not (np.isfinite(a) & np.isfinite(b))[~same].all():
        return float("inf")
    finite = b[np.isfinite(b)]
    return float(np.abs(a[~same] - b[~same]).max() / max(1.0, float(finite.std())))


@dataclass(frozen=True)
class Difference:
    """How two arrays differ. ``index`` is the first element whose bytes differ; ``largest`` the largest absolute
    difference (nan where a nan faces a number)."""

    same_bytes: bool
    largest: float
    index: tuple[int, ...] | None = None
    left: float | None = None
    right: float | None = None


def bytes_of(array: Array) -> bytes:
    """The raw bytes in C order."""
    return np.ascontiguousarray(array).tobytes()


def compare_bytes(left: Array, right: Array) -> Difference:
    """Compare as bytes: -0.0 differs from 0.0, a nan equals the same nan. Shapes and dtypes must agree (ValueError)."""
    if left.shape != right.shape or left.dtype != right.dtype:
        raise ValueError(f"cannot compare {left.dtype}{list(left.shape)} with {right.dtype}{list(right.shape)}")
    if bytes_of(left) == bytes_of(right):
        return Difference(True, 0.0)
    width = left.dtype.itemsize
    a = np.frombuffer(bytes_of(left), np.uint8).reshape(*left.shape, width)
    b = np.frombuffer(bytes_of(right), np.uint8).reshape(*right.shape, width)
    index = tuple(int(i) for i in np.argwhere((a != b).any(-1))[0])
    with np.errstate(invalid="ignore"):
        gap = np.abs(left.astype(np.float64) - right.astype(np.float64))
    gap = np.where((a == b).all(-1), 0.0, gap)  # inf facing the same inf would be nan and hide the rest
    return Difference(False, float(gap.max()), index, float(left[index]), float(right[index]))
