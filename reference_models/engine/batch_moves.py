"""Moves of slots among the rows of a batch, on the buffers of one side of a cache.

Each makes a new ``Side`` of the least capacity and leaves the old one as it is, so that a caller changes nothing before
all has succeeded. All arrays of a side (rows, or int8 rows and scales) go through the same move. Slots without a token
come out as zeros: a mask hides their scores, but a value that is not finite would still reach the sum, as ``0 * inf``.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .batch_rows import right_aligned
from .kv_cache import KVCache
from .runs import found, joined
from .side import Side


def in_order(cache: KVCache) -> tuple[dict[str, mx.array], dict[str, Any]]:
    """The ``state`` of the cache of one sequence, with its slots in the order of positions: a ring may have turned.

    Raises ValueError for a cache of several sequences.
    """
    arrays, told = cache.state()
    sequences = {array.shape[0] for array in arrays.values()} or {1}
    if sequences != {1}:
        raise ValueError(f"a row is one sequence: a cache of {sequences.pop()} cannot join a batch")
    parts = found(cache.runs, [range(cache.offset)])
    if arrays and len(parts) > 1:
        slots = mx.concatenate([mx.arange(slot, slot + len(run)) for slot, run in parts])
        arrays = {name: array[:, :, slots] for name, array in arrays.items()}
    held = [[run.start, run.stop] for run in joined(run for _, run in parts)]
    return arrays, told | {"held": held}


def gathered(side: Side, rows: Sequence[int], kept: Sequence[Sequence[range]], slots: int) -> Side:
    """Rows of ``side`` with some of their slots, aligned at the right.

    Args:
        side: arrays ``[B, H, capacity, *]``.
        rows: which rows, in their new order; one may be named twice.
        kept: of each of these rows, the slots to keep in ascending runs, at most ``slots`` of them.
        slots: slots of the result, >= 1.

    Returns:
        A side whose arrays have ``slots`` live slots ``[len(rows), H, slots, *]``.
    """
    index = right_aligned(kept, slots, -1)[:, None, :, None]

    def move(array: mx.array) -> mx.array:
        moved = mx.take_along_axis(array[mx.array(list(rows))], mx.maximum(index, 0), axis=2)
        return mx.where(index >= 0, moved, mx.zeros_like(moved))

    return Side.of(side.storage, side.dtype, [move(array) for array in side.arrays])


def stacked(parts: Sequence[tuple[Side | None, int, int]], slots: int) -> Side | None:
    """Batches behind each other, all aligned at the right.

    Args:
        parts: ``(side, slots, rows)`` of each batch; the side counts only where it has slots.
        slots: slots of the result, at least those of every part.

    Returns:
        A side of ``slots`` live slots with all rows in order; None when no part has slots.

    Raises:
        ValueError: the parts that count disagree in H, D or the dtype.
    """
    filled = [side for side, mine, _ in parts if side is not None and mine]
    if not filled:
        return None
    first = filled[0]
    for side in filled:
        if (side.bound[1:], side.dtype) != (first.bound[1:], first.dtype):
            raise ValueError(
                f"rows of (H, D) = {side.bound[1:]} and {side.dtype} cannot stand in a batch with rows of "
                f"{first.bound[1:]} and {first.dtype}"
            )
    batch = sum(rows for _, _, rows in parts)
    arrays = []
    for number, like in enumerate(first.arrays):
        new = mx.zeros((batch, like.shape[1], slots, like.shape[3]), like.dtype)
        at = 0
        for part, mine, rows in parts:
            if part is not None and mine:
                new[at : at + rows, :, slots - mine :] = part.arrays[number][:, :, :mine]
            at += rows
        arrays.append(new)
    return Side.of(first.storage, first.dtype, arrays)
