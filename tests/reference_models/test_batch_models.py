"""Every family over ragged batches: each row answers as it would alone, whatever happens to the others.

Measured in float32 on the CPU of Linux: all are equal to the bit but mistral4 with a latent cache, which takes the
absorbed form for one token alone and the other for the same token in a chunk that is padded.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from kv_harness_batch_runs import ROUNDING, Run

from reference_models import registry
from reference_models.engine import BatchKVCache

VARIANTS = [variant for family in registry.FAMILIES for variant in registry.variants(family)]
IDS = [f"{variant.family}-{variant.name}" for variant in VARIANTS]

_models: dict[str, Any] = {}


@pytest.fixture(params=VARIANTS, ids=IDS)
def model(request: pytest.FixtureRequest) -> Any:
    variant = request.param
    return _models.setdefault(f"{variant.family}/{variant.name}", variant.build(seed=3))


@pytest.mark.parametrize("batch", [2, 3, 4])  # KV heads: 1, 2 or 4; query heads: 2 or 4
def test_every_row_answers_as_alone(model: Any, batch: int) -> None:
    Run(model, batch, seed=batch).steps(5)


@pytest.mark.parametrize(
    "variant", [registry.variants(family)[0] for family in registry.FAMILIES], ids=registry.FAMILIES
)
def test_int8_caches_too(variant: registry.Variant) -> None:
    """Equal rows are rounded to equal numbers; where they are not equal to the bit, the last step may go either way."""
    latent = variant.options.get("cache_form") == "latent"
    for batch in (2, 4):
        Run(variant.build(3), batch, seed=batch, storage="int8", rounding=2e-2 if latent else ROUNDING).steps(5)


def test_a_batch_of_one_is_the_solo_run_to_the_bit(model: Any) -> None:
    run = Run(model, 1, seed=5, rounding=0.0)
    run.even(4)
    run.even(1)
    run.trim_front()
    run.rollback()
    for n in (1, 3, 1):
        run.even(n)
    assert run.worst == 0


def test_even_rows_take_the_masks_of_one_sequence(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nothing is padded, and no window hides it, one token takes no mask at all."""
    if 1 in getattr(model, "windows", ()):
        pytest.skip("its second token does not see the first")
    given: list[Any] = []
    attention = mx.fast.scaled_dot_product_attention
    monkeypatch.setattr(
        mx.fast,
        "scaled_dot_product_attention",
        lambda *rows, mask, **rest: given.append(mask) or attention(*rows, mask=mask, **rest),
    )
    caches = [BatchKVCache("rows", 2) for _ in model.attention_layers]
    model(mx.zeros((2, 1), mx.int32), caches)
    model(mx.zeros((2, 1), mx.int32), caches)
    # The absorbed form of MLA passes its rope scores where a mask goes.
    assert all(mask is None or mask.dtype == mx.float32 for mask in given)
    given.clear()
    for cache in caches:
        cache.prepare([2, 1])
    model(mx.zeros((2, 2), mx.int32), caches)
    assert [mask.shape for mask in given] == [(2, 1, 2, 4)] * len(caches)


def test_what_stands_in_padding_changes_no_bit(model: Any) -> None:
    outputs = []
    for filler in (0, 33):
        caches = [BatchKVCache("rows", 3) for _ in model.attention_layers]
        pieces = []
        for lengths in ([3, 1, 0], [1, 3, 2], [0, 2, 3]):
            for cache in caches:
                cache.prepare(lengths)
            tokens = [[7 + at if at < n else filler for at in range(3)] for n in lengths]
            logits = np.array(model(mx.array(tokens), caches))
            pieces += [logits[row, :n].tobytes() for row, n in enumerate(lengths)]
        outputs.append(pieces)
    assert outputs[0] == outputs[1]


def test_the_offset_policy_fits_until_a_row_was_trimmed(model: Any) -> None:
    def logits(policy: str, trim: int) -> Any:
        caches = [BatchKVCache("rows", 2) for _ in model.attention_layers]
        for cache in caches:
            cache.prepare([5, 3])
        model(mx.array([[1, 2, 3, 4, 5], [6, 7, 8, 0, 0]]), caches, mask_policy=policy)
        for cache in caches:
            cache.trim_front([trim, 0])
        return np.array(model(mx.array([[1, 2], [3, 4]]), caches, mask_policy=policy))

    assert logits("live", 0).tobytes() == logits("offset", 0).tobytes()
    with pytest.raises(ValueError, match="broadcast"):
        logits("offset", 1)


def test_tokens_and_caches_must_be_of_as_many_rows(model: Any) -> None:
    caches = [BatchKVCache("rows", 3) for _ in model.attention_layers]
    with pytest.raises(ValueError, match=r"tokens \[2, 4\] for caches of 3 rows"):
        model(mx.zeros((2, 4), mx.int32), caches)
    assert caches[0].offsets == (0, 0, 0)
