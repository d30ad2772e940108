"""Logits of a loaded model for whole prompts, with NumPy on both sides."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.inputs import Inputs, Row, rows_of
from reference_models.prompt import Images, Prompt


def logits(model: Any, inputs: Inputs | NDArray[Any]) -> NDArray[np.float32]:
    """``[B, T]`` -> float32 ``[B, T, vocab]`` of one forward over empty caches; with images, of one for each row.

    CheckpointError if the inputs do not fit the model, or MLX cannot do it.
    """
    rows = _rows(model, inputs)
    with _one_line():
        out = []
        for ids, prompt in _sequences(model, rows):
            made = model(ids, model.make_caches(), **prompt).astype(mx.float32)
            mx.eval(made)
            out.append(np.array(made))
    return np.concatenate(out)


def greedy(model: Any, inputs: Inputs | NDArray[Any], count: int) -> NDArray[np.int32]:
    """``count`` greedy tokens ``[B, count]`` behind each row of the prompts, over the model's caches; errors as in
    ``logits``."""
    rows = _rows(model, inputs)
    out = []
    with _one_line():
        for tokens, prompt in _sequences(model, rows):
            caches, made = model.make_caches(), []
            for _ in range(count):
                tokens = mx.argmax(model(tokens, caches, **prompt)[:, -1:], axis=-1).astype(mx.int32)
                mx.eval(tokens)
                made.append(np.array(tokens))
            out.append(np.concatenate(made, axis=1))
    return np.concatenate(out)


def _rows(model: Any, inputs: Inputs | NDArray[Any]) -> tuple[Row, ...]:
    return rows_of(inputs if isinstance(inputs, Inputs) else Inputs(inputs), model.config)


def _sequences(model: Any, rows: tuple[Row, ...]) -> Iterator[tuple[mx.array, dict[str, Prompt]]]:
    """What single forwards take: the whole batch when it is text alone, else each row with what was read of it."""
    ids = mx.array(np.concatenate([row.ids for row in rows]).astype(np.int32))
    if not any(row.arrays for row in rows):
        yield ids, {}
        return
    for index, row in enumerate(rows):
        arrays = {name: mx.array(_as_mlx(array)) for name, array in row.arrays.items()}
        one = ids[index : index + 1]
        yield one, {"prompt": model.read(one, Images(**arrays))} if arrays else {}


def _as_mlx(array: NDArray[Any]) -> NDArray[Any]:
    """Pixels in float32, grids in int32: MLX's types on a CPU and on a GPU."""
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int32)


@contextmanager
def _one_line() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:
        remedy = "; try --dtype float32" if "float32" in str(error) else ""
        raise CheckpointError(f"the model cannot run here: {error}{remedy}") from error
