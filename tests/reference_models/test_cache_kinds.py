"""Models on caches that forget by a rule: any cut of the tokens equals one forward that is told who sees whom."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference_models import registry, rope
from reference_models.engine import CacheSpec, RotatingKVCache
from reference_models.registry import Variant
from tests.reference_models.cache_runs import CUTS, SPECS, TOLERANCE, VARIANTS, built, name_of, run

programs = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(1, 8)),
        st.tuples(st.just("decode"), st.integers(1, 9)),
        st.tuples(st.just("rollback"), st.integers(0, 8)),
        st.tuples(st.just("trim"), st.integers(0, 8)),
        st.just(("go_on_with_copies",)),
    ),
    min_size=1,
    max_size=6,
)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: "-".join(map(str, spec.to_json().values())))
@pytest.mark.parametrize("family", registry.FAMILIES)
@settings(max_examples=12, deadline=None)
@given(st.data())
def test_any_program_equals_one_forward_that_is_told_who_sees_whom(
    family: str, spec: CacheSpec, data: st.DataObject
) -> None:
    variant = data.draw(st.sampled_from(registry.variants(family)))
    program = data.draw(programs)
    assert run(variant, spec, program).error() <= TOLERANCE[spec.storage]


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_variant_on_every_kind(variant: Variant) -> None:
    for spec, cut in zip(SPECS, itertools.cycle(CUTS), strict=False):
        assert run(variant, spec, cut).error() <= TOLERANCE[spec.storage]
        assert run(variant, spec, CUTS[2]).error() <= TOLERANCE[spec.storage]


@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_what_forgets_nothing_is_the_dense_cache_to_the_bit(variant: Variant) -> None:
    dense = run(variant, CacheSpec(), CUTS[2]).logits
    for spec in (CacheSpec("rotating", window=21), CacheSpec("chunked", chunk=21), CacheSpec("paged", block=3)):
        assert np.array_equal(run(variant, spec, CUTS[2]).logits, dense)


WINDOWED = [variant for variant in VARIANTS if any(getattr(built(variant), "windows", ()))]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("variant", WINDOWED, ids=name_of)
def test_sliding_layers_rotate_and_full_layers_do_not(variant: Variant, cut: list[tuple[Any, ...]]) -> None:
    spec = CacheSpec("rotating")
    rotating, dense = run(variant, spec, cut), run(variant, CacheSpec(), cut)
    kinds = [cache.window if isinstance(cache, RotatingKVCache) else None for cache in rotating.caches]
    assert kinds == list(rotating.windows)
    assert rotating.error() <= 1e-5
    assert np.abs(np.array(rotating.logits) - np.array(dense.logits)).max() <= 1e-5 * np.std(dense.logits)
    assert sum(cache.nbytes for cache in rotating.caches) < sum(cache.nbytes for cache in dense.caches)
    trimmed = run(variant, spec, [*cut, ("trim", 18), ("forward", 3), ("rollback", 1), ("decode", 3)])
    assert trimmed.start == 18 and len(trimmed.tokens) == len(rotating.tokens) + 5 and trimmed.error() <= 1e-5


def test_a_model_without_windows_has_none_to_give() -> None:
    without = next(variant for variant in VARIANTS if variant not in WINDOWED)
    with pytest.raises(ValueError, match="window is missing"):
        built(without).make_caches(CacheSpec("rotating"))


_QWEN3 = {"head_dim": 32, "rope_scaling": rope.MRopeScaling((6, 5, 5), mrope_interleaved=True)}
#: Of every family a variant, and what gives it heads that groups of 32 divide.
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral4": (
        "experts",
        {"kv_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32},
    ),
    "nemotron_nas": ("different-groups", {"hidden_size": 128}),
    "qwen2_vl": ("plain", {"hidden_size": 128, "rope_scaling": rope.MRopeScaling((6, 5, 5))}),
    "qwen3_vl": ("plain", _QWEN3),
    "qwen3_vl_moe": ("plain", _QWEN3),
}
WIDE = [
    replace(variant, config=replace(variant.config, **changes))
    for family, (name, changes) in CHANGES.items()
    for variant in registry.variants(family)
    if variant.name.startswith(name)
]


@pytest.mark.parametrize("variant", WIDE, ids=name_of)
@pytest.mark.parametrize(
    "spec",
    [
        CacheSpec(),
        CacheSpec("rotating", window=6, sinks=2),
        CacheSpec("chunked", chunk=4),
        CacheSpec("paged", block=4),
    ],
    ids=lambda spec: spec.kind,
)
def test_affine_rows_under_every_kind(variant: Variant, spec: CacheSpec) -> None:
    spec = replace(spec, storage="affine8")
    for cut in CUTS:
        assert run(variant, spec, cut).error() <= TOLERANCE["affine8"]


@pytest.mark.parametrize("variant", WIDE, ids=name_of)
def test_affine_costs_little_and_four_bits_more(variant: Variant) -> None:
    exact = np.array(run(variant, CacheSpec(), CUTS[2]).logits)
    cost = {}
    for storage in ("affine8", "affine4"):
        logits = np.array(run(variant, CacheSpec(storage=storage), CUTS[2]).logits)
        cost[storage] = float(np.sqrt(((logits - exact) ** 2).mean()) / exact.std())
    assert 0 < cost["affine8"] < 0.02 < cost["affine4"] < 0.5, cost


@pytest.mark.parametrize("variant", [each for each in VARIANTS if each.name.startswith("vision")][:1], ids=name_of)
def test_a_head_that_the_groups_do_not_divide_is_refused(variant: Variant) -> None:
    model = built(variant)
    caches = model.make_caches(CacheSpec(storage="affine8"))
    with pytest.raises(ValueError, match="keys have D=8: affine8 needs a multiple of its group size 32"):
        model(mx.array([[1, 2]]), caches)
    assert all(cache.offset == 0 and cache.capacity == 0 for cache in caches)
