"""MiniCPM3's own bug, a rotation that counts keys, and its LongRoPE by hand."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models import minicpm3
from reference_models.minicpm3 import LongRope
from reference_models.weights import randomise

TOKENS = np.random.default_rng(3).integers(0, 64, (1, 16))


def built(rope_from: minicpm3.RopeFrom) -> minicpm3.Model:
    model = minicpm3.Model(minicpm3.TINY["plain"], rope_from=rope_from)
    randomise(model, 4)
    return model


def run(model: Any, trim: int) -> tuple[Any, Any]:
    """Logits of eight tokens, then of three more behind a front trim."""
    caches = model.make_caches()
    before = np.array(model(mx.array(TOKENS[:, :8]), caches))
    for cache in caches:
        cache.trim_front(trim)
    return before, np.array(model(mx.array(TOKENS[:, 8:11]), caches))


def test_counting_keys_is_right_until_the_first_front_trim(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = built("offset"), built("live")
    for one, other in zip(run(right, 0), run(wrong, 0), strict=True):
        assert one.tobytes() == other.tobytes()
    (before, behind), (also_before, moved) = run(right, 3), run(wrong, 3)
    assert before.tobytes() == also_before.tobytes()
    assert np.abs(behind - moved).max() > 1e-2 * behind.std()
    given: list[Any] = []
    original = mx.fast.rope

    def noted(*args: Any, offset: Any, **named: Any) -> Any:
        given.append(offset)
        return original(*args, offset=offset, **named)

    monkeypatch.setattr(mx.fast, "rope", noted)
    run(wrong, 3)
    assert given == [0] * 4 + [5] * 4  # queries and keys of two layers: five keys are held, three were trimmed


def test_an_unknown_source_of_positions_is_refused() -> None:
    with pytest.raises(ValueError, match="rope_from must be one of"):
        minicpm3.Model(minicpm3.TINY["plain"], rope_from="keys")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cache_form must be one of"):
        minicpm3.Model(minicpm3.TINY["plain"], "both")  # type: ignore[arg-type]


def test_the_context_that_a_model_is_made_for_chooses_its_factors() -> None:
    scaling = LongRope((1.0, 2.0), (4.0, 8.0), 16)
    assert scaling.freqs(100.0, 16).tolist() == [1.0, 20.0] and scaling.amplitude(16) == 1
    assert scaling.freqs(100.0, 17).tolist() == [4.0, 80.0]
    assert scaling.amplitude(64) == pytest.approx(math.sqrt(1 + 0.5))  # four times 16, and 16 is 4 squared
    assert scaling.freqs(100.0, 8).tolist() == [1.0, 20.0] and scaling.amplitude(8) == 1


@pytest.mark.parametrize(
    ("short", "longer", "original", "named"),
    [
        ((), (), 16, "one number for every pair"),
        ((1.0,), (1.0, 2.0), 16, "one number for every pair"),
        ((0.0,), (1.0,), 16, "a factor of longrope"),
        ((1.0,), (math.inf,), 16, "a factor of longrope"),
        ((1.0,), (2.0,), 1, "original_max_position_embeddings"),
    ],
)
def test_factors_that_slow_nothing_are_refused(short: Any, longer: Any, original: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        LongRope(short, longer, original)
