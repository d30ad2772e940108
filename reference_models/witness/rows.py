"""What a token leaves in a cache, and how near a right model may have come to another number.

Two things in a forward are not continuous: which experts are chosen, and how a quantised cache rounds. Where a score
lies a rounding error away from the other choice, two right models part, and from there on their logits have little to
do with each other. So every token carries the smallest such gap that anything it rests on has met: its own, and those
of all tokens that it sees, layer by layer. Who compares decides how small is too small.
"""

from __future__ import annotations

import numpy as np

from reference_models.witness.parts import Array

LEVELS = 127
GROUP = 32
AFFINE = {"affine8": 8, "affine4": 4}
"""Storages, and the bits of a number."""


class Gaps:
    """``choice [S]``: between the last expert (or group) taken and the first left, in softmax scores. ``rounding [S]``:
    to the nearest point at which a quantised cache would have stored another number, in steps of 1/127 of what it
    spans. Infinite where neither plays a part."""

    def __init__(self, count: int) -> None:
        self.choice = np.full(count, np.inf)
        self.rounding = np.full(count, np.inf)

    def attended(self, visible: Array) -> None:
        """Every token has read the rows of those that it sees, ``visible [S, S]``."""
        for gaps in (self.choice, self.rounding):
            if np.isfinite(gaps).any():
                gaps[:] = np.where(visible, gaps, np.inf).min(axis=-1)

    def chose(self, between: Array) -> None:
        np.minimum(self.choice, between, out=self.choice)

    def rounded(self, between: Array) -> None:
        np.minimum(self.rounding, between, out=self.rounding)


class Rows:
    """What the cache gives back of what was written: the same (``rows``), or rounded (``int8``, ``affine8``,
    ``affine4``). ``storage``: of all tokens, or ``[S]``, of each."""

    def __init__(self, storage: str | Array, gaps: Gaps) -> None:
        if unknown := sorted(set(np.atleast_1d(storage).tolist()) - {"rows", "int8", *AFFINE}):
            raise ValueError(f"the witness knows the storages rows, int8, {', '.join(AFFINE)}, not {unknown[0]!r}")
        self._storages = np.broadcast_to(storage, gaps.choice.shape)
        self._gaps = gaps

    def stored(self, rows: Array) -> Array:
        """``[H, S, D]`` kept."""
        kept = rows
        for storage in sorted(set(self._storages.tolist()) - {"rows"}):
            here = self._storages == storage
            rounded, between = _int8(rows) if storage == "int8" else _affine(rows, AFFINE[storage])
            kept = np.where(here[:, None], rounded, kept)
            self._gaps.rounded(np.where(here, between.min(axis=0), np.inf))
        return kept


def _int8(rows: Array) -> tuple[Array, Array]:
    """Per head and token one fp16 scale, ``absmax / 127`` (0 becomes 1), and ``clip(round(x / scale), -128, 127)``;
    multiplied out again. And ``[H, S]``, the gaps."""
    exact = np.abs(rows).max(axis=-1, keepdims=True) / LEVELS
    narrow = exact.astype(np.float16)
    scale = np.where(narrow == 0, 1.0, narrow.astype(np.float64))
    ratio = rows / scale
    gaps = np.minimum(_to_a_tie(ratio).min(axis=-1), _to_another_scale(exact, narrow)[..., 0])
    return np.clip(np.rint(ratio), -LEVELS - 1, LEVELS) * scale, gaps


def _affine(rows: Array, bits: int) -> tuple[Array, Array]:
    """MLX's: per group of 32 numbers a scale, ``(high - low) / (2**bits - 1)``, then moved so that 0 is a whole number
    of scales from ``edge``, the end of larger magnitude, from which numbers are counted. As ``_int8``."""
    heads, count, dim = rows.shape
    if dim % GROUP:
        raise ValueError(f"rows of {dim} numbers have no groups of {GROUP}")
    levels = 2**bits - 1
    group = rows.reshape(heads, count, -1, GROUP)
    low, high = group.min(axis=-1, keepdims=True), group.max(axis=-1, keepdims=True)
    edge = np.where(np.abs(low) > np.abs(high), low, high)
    scale = np.maximum((high - low) / levels, 1e-7) * np.where(edge == low, 1, -1)
    steps = edge / scale
    whole = np.rint(steps)
    start = np.where(whole == 0, 0.0, edge)
    scale = np.where(whole == 0, scale, edge / np.where(whole == 0, 1, whole))
    ratio = (group - start) / scale
    gaps = np.minimum(_to_a_tie(ratio).min(axis=-1), _to_a_tie(steps)[..., 0]) * LEVELS / levels
    return (np.clip(np.rint(ratio), 0, levels) * scale + start).reshape(rows.shape), gaps.min(axis=-1)


def _to_a_tie(ratio: Array) -> Array:
    return np.asarray(np.abs(ratio - np.floor(ratio) - 0.5))


def _to_another_scale(exact: Array, narrow: Array) -> Array:
    """How far ``exact`` lies from the middle between its fp16 number and the next, in steps of the row's largest."""
    middles = [
        (narrow.astype(np.float64) + np.nextafter(narrow, np.float16(to)).astype(np.float64)) / 2 for to in (0, np.inf)
    ]
    nearest = np.minimum(*(np.abs(exact - middle) for middle in middles))
    return np.asarray(np.where(exact == 0, np.inf, nearest / np.where(exact == 0, 1, exact) * LEVELS))
