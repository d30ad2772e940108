"""What a token leaves in a cache, and how near a right model may have come to another number.

Two things in a forward are not continuous: which experts are chosen, and how an Int8 cache rounds. Where a score lies
a rounding error away from the other choice, two right models part, and from there on their logits have little to do
with each other. So every token carries the smallest such gap that anything it rests on has met: its own, and those of
all tokens that it sees, layer by layer. Who compares decides how small is too small.
"""

from __future__ import annotations

import numpy as np

from reference_models.witness.parts import Array

LEVELS = 127


class Gaps:
    """``choice [S]``: between the last expert (or group) taken and the first left, in softmax scores. ``rounding [S]``:
    to the nearest point at which an Int8 cache would have stored another number, in steps. Infinite where neither
    plays a part."""

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
    """What the cache gives back of what was written: the same (``rows``), or rounded (``int8``)."""

    def __init__(self, storage: str, gaps: Gaps) -> None:
        if storage not in ("rows", "int8"):
            raise ValueError(f"the witness knows the storages rows and int8, not {storage!r}")
        self._rounds, self._gaps = storage == "int8", gaps

    def stored(self, rows: Array) -> Array:
        """``[H, S, D]`` kept. Int8: per head and token one fp16 scale, ``absmax / 127`` (0 becomes 1), and
        ``clip(round(x / scale), -128, 127)``; multiplied out again."""
        if not self._rounds:
            return rows
        exact = np.abs(rows).max(axis=-1, keepdims=True) / LEVELS
        narrow = exact.astype(np.float16)
        scale = np.where(narrow == 0, 1.0, narrow.astype(np.float64))
        ratio = rows / scale
        steps = np.abs(ratio - np.floor(ratio) - 0.5).min(axis=-1)
        self._gaps.rounded(np.minimum(steps, _to_another_scale(exact, narrow)[..., 0]).min(axis=0))
        return np.asarray(np.clip(np.rint(ratio), -LEVELS - 1, LEVELS) * scale)


def _to_another_scale(exact: Array, narrow: Array) -> Array:
    """How far ``exact`` lies from the middle between its fp16 number and the next, in steps of the row's largest."""
    middles = [
        (narrow.astype(np.float64) + np.nextafter(narrow, np.float16(to)).astype(np.float64)) / 2 for to in (0, np.inf)
    ]
    nearest = np.minimum(*(np.abs(exact - middle) for middle in middles))
    return np.asarray(np.where(exact == 0, np.inf, nearest / np.where(exact == 0, 1, exact) * LEVELS))
