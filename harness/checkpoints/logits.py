"""Logits of a loaded model for whole prompts, with NumPy on both sides."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from harness.checkpoints.errors import CheckpointError


def check_ids(ids: NDArray[Any], vocab_size: int) -> None:
    """CheckpointError unless ``ids`` is a non-empty integer [B, T] inside the vocabulary."""
    if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        raise CheckpointError(f"ids must be whole numbers [B, T], not {ids.dtype} {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(f"ids must lie in 0..{vocab_size - 1}; they reach from {ids.min()} to {ids.max()}")


def logits(model: Any, ids: NDArray[Any]) -> NDArray[np.float32]:
    """``[B, T]`` -> float32 ``[B, T, vocab]`` of one forward over empty caches. CheckpointError if MLX cannot do it."""
    check_ids(ids, model.config.vocab_size)
    try:
        out = model(mx.array(ids.astype(np.int32)), model.make_caches()).astype(mx.float32)
        mx.eval(out)
    except (RuntimeError, ValueError) as error:
        remedy = "; try --dtype float32" if "float32" in str(error) else ""
        raise CheckpointError(f"the model cannot run here: {error}{remedy}") from error
    return np.array(out)


def greedy(model: Any, ids: NDArray[Any], count: int) -> NDArray[np.int32]:
    """``count`` greedy tokens ``[B, count]`` behind each row of ``ids [B, T]``, over the model's caches."""
    check_ids(ids, model.config.vocab_size)
    caches = model.make_caches()
    tokens = mx.array(ids.astype(np.int32))
    made = []
    for _ in range(count):
        tokens = mx.argmax(model(tokens, caches)[:, -1:], axis=-1).astype(mx.int32)
        mx.eval(tokens)
        made.append(np.array(tokens))
    return np.concatenate(made, axis=1)
