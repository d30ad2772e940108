"""The estimate of what a checkpoint takes, against what it takes."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from harness.checkpoints import footprint, free_bytes, load_model, open_checkpoint
from reference_models.registry import FAMILIES
from tests.checkpoints.conftest import Synth


@pytest.mark.parametrize("dtype", [None, "float32", "float16"])
@pytest.mark.parametrize("options", [{}, {"bits": 4}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_rows_are_estimated_to_the_byte(
    family: str, options: dict[str, Any], dtype: str | None, synth: Synth
) -> None:
    checkpoint = open_checkpoint(synth(family, **options))
    estimate = footprint(checkpoint, dtype)
    leaves: Any = tree_flatten(load_model(checkpoint, dtype).parameters())
    assert estimate.weights == sum(array.nbytes for _, array in leaves)
    if dtype == "float32":
        model = load_model(checkpoint, dtype)
        caches = model.make_caches()
        mx.eval(model(mx.array([[1, 2, 3]]), caches))
        assert estimate.token == sum(cache.bytes_per_slot for cache in caches)


def test_free_memory_is_a_number_of_bytes() -> None:
    assert 1 << 24 < free_bytes() < 1 << 50
