"""Images on caches that forget by a rule: chunks end inside an image, and parts of it are forgotten."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models.engine import CacheSpec, NoCache, VisibilityRule
from tests.reference_models.cache_runs import built, name_of
from tests.reference_models.test_prompt import BEHIND, VARIANTS, images, prompt_tokens

SPECS = {
    CacheSpec("rotating", window=5): VisibilityRule(5),
    CacheSpec("rotating", window=7, sinks=2): VisibilityRule(7, 2),
    CacheSpec("chunked", chunk=6): VisibilityRule(chunk=6),
    CacheSpec("paged", block=4): VisibilityRule(),
}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.to_json().values())))
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_any_cut_of_a_prompt_with_images(variant: Any, spec: CacheSpec) -> None:
    model = built(variant)
    prompt = model.read(mx.array([prompt_tokens(model)]), images(model))
    tokens = prompt_tokens(model) + BEHIND
    count = len(tokens)
    shown = SPECS[spec].mask(mx.arange(count), mx.arange(count))
    without = [NoCache() for _ in model.attention_layers]
    wanted = np.array(model(mx.array([tokens]), without, {None: shown}, prompt=prompt)[0])
    for cuts in ((), (4,), (5, 6, 7, 8, 13), range(1, count)):
        caches, edges = model.make_caches(spec), (0, *cuts, count)
        got = [np.array(model(mx.array([tokens[a:b]]), caches, prompt=prompt)[0]) for a, b in itertools.pairwise(edges)]
        assert np.abs(np.concatenate(got) - wanted).max() <= 1e-5 * wanted.std()
