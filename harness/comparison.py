"""The one place that compares numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

RECUT = {"rows": 1e-4, "paged": 1e-4, "rotating": 1e-4, "chunked": 1e-4, "int8": 5e-2, "affine8": 5e-2, "affine4": 3.0}
"""How far logits may differ when the same tokens are cut into other forwards, by cache storage, in deviations of the
logits. Sums are taken in another order then; in a quantised storage a difference in the last bit can move a number by a
whole step (Int8: 1/127 of the largest of its row; affine: 1/255 or 1/15 of what its group spans, of
which the latter also makes the rows of later layers others, and experts)."""


def recut_tolerance(*storages: str) -> float:
    """The widest of these storages, whose kind stands in front of a hyphen; of an unknown one the widest of all."""
    return max(RECUT.get(storage.split("-")[0], max(RECUT.values())) for storage in storages)


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


@dataclass(frozen=True)
class Limit:
    """``base``, and ``position`` more for each position: the angles of RoPE are rounded relative to their size, by half
    an ulp (6e-8) of queries and of keys, and everything behind them inherits that."""

    base: float
    position: float

    def at(self, positions: Array) -> Array:
        return self.base + self.position * positions


@dataclass(frozen=True)
class Tolerance:
    """How far the logits of two right ways to compute may lie apart, in standard deviations of the logits.

    ``logits``: of any token. ``choice``: two softmax scores of experts that are nearer than this may be ranked either
    way. ``rounding``: a row of a quantised cache that is nearer than this to being stored as other numbers may be (in
    steps of 1/127 of what it spans, so that an angle that is off by 6e-8 counts for 1e-5).
    """

    logits: Limit
    choice: Limit
    rounding: Limit


TOLERANCES = {
    "float32": Tolerance(logits=Limit(5e-5, 4e-7), choice=Limit(2e-5, 1e-7), rounding=Limit(3e-4, 1.2e-5)),
}
"""By the dtype in which the target computes. tests/bench/witness.py measures what right models need."""


def allowed(
    dtype: str,
    positions: Array,
    choice_gap: Array | None = None,
    rounding_gap: Array | None = None,
    rounded: float = RECUT["int8"],
) -> tuple[Array, Array]:
    """Of each token [S]: the difference allowed (infinite where experts nearly tie: nothing can be said), and whether
    the strict tolerance judges it. ``rounded``: what a token may differ by, and the scores of its experts, where a row
    may be stored as other numbers. Raises ValueError for a dtype without a tolerance."""
    if dtype not in TOLERANCES:
        raise ValueError(f"no tolerance is known for {dtype}: only for {', '.join(TOLERANCES)}")
    rule = TOLERANCES[dtype]
    limit = rule.logits.at(positions)
    may_round = np.zeros(len(positions), bool)
    if rounding_gap is not None:
        may_round = rounding_gap < rule.rounding.at(positions)
    limit = np.where(may_round, rounded, limit)
    if choice_gap is not None:
        limit = np.where(choice_gap < np.where(may_round, rounded, rule.choice.at(positions)), np.inf, limit)
    return limit, ~may_round & np.isfinite(limit)
