"""Takes what a forward of a batch did apart, so that every row is judged as if it had been alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.target import AttentionCall, AttentionValues, ForwardObservation, PositionCall

_Array = np.ndarray[Any, Any]


def rows_of(
    tokens: Sequence[Sequence[int]],
    logits: _Array | None,
    attention: Sequence[AttentionCall],
    positions: Sequence[PositionCall],
    seconds: float,
    error: str | None,
) -> tuple[ForwardObservation, ...]:
    """One ForwardObservation for each row.

    ``tokens``: of each row, without padding, which is at the right; ``logits`` [B, l, vocab], ``attention`` and
    ``positions`` as a probe saw them in the whole forward, whose ``seconds`` are shared out evenly. What is padding at
    the right is left out of the queries, but not of the keys: attention received it, and a mask must hide it.
    """
    made = []
    longest = max(map(len, tokens), default=0)
    for row, mine in enumerate(tokens):
        l = len(mine)
        made.append(
            ForwardObservation(
                tuple(mine),
                None if logits is None else logits[row, :l],
                tuple(_attention(call, row, len(tokens), l) for call in attention),
                tuple(_positions(call, row, len(tokens), longest, l) for call in positions),
                seconds / len(tokens),
                error,
            )
        )
    return tuple(made)


def _attention(call: AttentionCall, row: int, batch: int, l: int) -> AttentionCall:
    """``shown`` of the row, [1, H or 1, l or 1, K]. A mask whose first axis is not the batch is every row's, as it is
    to attention: one of shape [B, l, K] stands for heads."""
    shown = call.shown
    if shown is not None:
        shown = shown[row : row + 1] if shown.shape[0] == batch else shown
        shown = shown[..., :l, :] if shown.shape[-2] == call.query_len else shown
    return replace(call, query_len=min(call.query_len, l), shown=shown, values=_values(call.values, row, batch, l))


def _values(values: AttentionValues | None, row: int, batch: int, l: int) -> AttentionValues | None:
    if values is None:
        return None
    mine = slice(row, row + 1)
    added = values.added
    if added is not None:
        added = added[mine] if added.shape[0] == batch else added
        added = added[..., :l, :] if added.shape[-2] > 1 else added
    queries, out = values.queries[mine, :, :l], values.out[mine, :, :l]
    return AttentionValues(queries, values.keys[mine], values.values[mine], out, values.scale, added, values.sinks)


def _positions(call: PositionCall, row: int, batch: int, longest: int, l: int) -> PositionCall:
    """Positions of the row: [l], or [3, 1, l] of M-RoPE. What is not as long as the chunk, a table of angles say, is
    left as it is."""
    given = np.asarray(call.positions)
    if given.ndim > 1 and given.shape[-2] == batch:
        given = given[..., row : row + 1, :]
    return PositionCall(call.kind, given[..., :l] if given.ndim and given.shape[-1] == longest else given)
