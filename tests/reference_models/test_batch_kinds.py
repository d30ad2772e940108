"""Every family over ragged batches of the other kinds of caches: each row answers, and refuses, as it would alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from kv_harness_batch_runs import ROUNDING, Run, reader

from reference_models import registry
from reference_models.engine import CacheSpec
from reference_models.registry import Variant

SPECS = (
    CacheSpec("rotating", window=5),
    CacheSpec("rotating", window=6, sinks=2),
    CacheSpec("rotating", "int8", window=4),
    CacheSpec("chunked", chunk=4),
    CacheSpec("paged", block=3),
)
LAYERS = CacheSpec("rotating")  # in layers with a sliding window alone
WINDOWED = ("cohere2", "olmo3", "qwen2_vl")
INT8 = 5e-2  # a step of Int8 that two ways of summing may round apart


@functools.cache
def built(variant: Variant) -> Any:
    return variant.build(3)


def simplest(family: str, windows: bool = False, vision: bool = False) -> Variant:
    """The first variant of several layers, with a sliding window or with none, with a vision tower or not."""
    for variant in registry.variants(family):
        model = built(variant)
        fits = any(getattr(model, "windows", ())) == windows and (variant.reads_images or not vision)
        if fits and len(model.attention_layers) > 1:
            return variant
    raise LookupError(family)


def rounding(spec: CacheSpec) -> float:
    return INT8 if spec.storage == "int8" else ROUNDING


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_row_answers_as_alone(family: str, spec: CacheSpec) -> None:
    for batch in (2, 4):
        Run(built(simplest(family)), batch, seed=batch, storage=spec, rounding=rounding(spec)).steps(7)


@pytest.mark.parametrize("spec", [LAYERS, *SPECS], ids=str)
@pytest.mark.parametrize("family", WINDOWED)
def test_beside_sliding_windows(family: str, spec: CacheSpec) -> None:
    for batch in (2, 3):
        Run(built(simplest(family, windows=True)), batch, batch, spec, rounding=rounding(spec)).steps(7)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_with_images(family: str, spec: CacheSpec) -> None:
    """Parts of an image are forgotten while the rest of it is still to come."""
    model = built(simplest(family, vision=True))
    for batch in (2, 3):
        Run(model, batch, batch, spec, reader(model), rounding(spec)).steps(7)
