"""What a probe saw of the calls that a forward made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

MaskKind = Literal["none", "causal", "bool", "additive"]
AttentionKind = Literal["fast", "softmax", "quantised"]


@dataclass(frozen=True, eq=False)
class AttentionValues:
    """What an attention call was given and what it gave, float64: ``queries`` [B, H, l, D], ``keys`` and ``values``
    [B, Hk, K, *], ``out`` [B, H, l, Dv], the ``scale`` of the scores, and what was ``added`` to them, [B or 1, H or 1,
    l or 1, K], -inf where a mask hides; None without a mask. ``sinks`` [H]: a score of every head that takes its share
    of the softmax and has no value."""

    queries: np.ndarray[Any, Any]
    keys: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    out: np.ndarray[Any, Any]
    scale: float
    added: np.ndarray[Any, Any] | None = None
    sinks: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward.

    Lengths are axis -2 of q, k and v.  ``mask_shape`` is the shape as passed; ``shown`` is the mask as booleans,
    [B or 1, H or 1, l or 1, key axis], True where the mask lets the query see the key, None without an explicit mask
    and from an engine that tells its shape alone.
    ``scores``: the array is dense scores that are added (an MLA decode), not a mask that hides; its key axis counts,
    its content proves nothing. ``values``: where a session was asked to tell them.
    """

    kind: AttentionKind
    query_len: int
    key_len: int
    value_len: int
    heads: int
    kv_heads: int
    mask: MaskKind
    mask_shape: tuple[int, ...] | None = None
    shown: np.ndarray[Any, Any] | None = None
    scores: bool = False
    values: AttentionValues | None = None

    @property
    def explicit(self) -> bool:
        """Did the model hand attention an array that decides who sees whom? "causal", None and the additive scores of
        a decode do not: nothing explicit was put to the test."""
        given = self.shown is not None or self.mask_shape is not None
        return given and not (self.scores and self.query_len == 1)

    @property
    def mask_keys(self) -> int | None:
        """The mask's key axis, None without an explicit mask or where it broadcasts (an axis of length 1). What a mask
        shows has its width, too, where its shape is not told."""
        shape = self.shown.shape if self.mask_shape is None and self.shown is not None else self.mask_shape
        if not shape:
            return None
        last = shape[-1]
        return None if last == 1 and self.key_len != 1 else last


@dataclass(frozen=True)
class PositionCall:
    """Absolute positions given to RoPE (``rope``), M-RoPE (``mrope``: [3, B, l]) or a position-dependent scale of the
    queries (``query_scale``); the last axis is the token."""

    kind: str
    positions: np.ndarray[Any, Any]


@dataclass(frozen=True)
class ArgumentChange:
    """An array that somebody has written into. ``what`` it was given or given out as; ``call``: the number of the
    attention layer, of arrays that belong to one; ``index`` of its first changed entry, which was ``was`` and is
    ``now`` (with another shape: no index, and the shapes)."""

    what: str
    call: int | None
    index: tuple[int, ...]
    was: str
    now: str


@dataclass(frozen=True)
class ArgumentsObservation:
    """Of the arrays that the forwards of an operation were ``given`` or made for several layers, and of those still
    ``held`` from the forward before the operation: how many were watched, and which are ``changed``."""

    given: int = 0
    held: int = 0
    changed: tuple[ArgumentChange, ...] = ()
