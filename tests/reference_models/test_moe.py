"""Routing and experts against plain NumPy loops."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from reference_models import layers, moe, weights

RNG = np.random.default_rng(2)
X = RNG.standard_normal((2, 5, 16)).astype(np.float32)


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def router(experts: int, top_k: int, **options: Any) -> moe.TopKRouter:
    made = moe.TopKRouter(16, experts, top_k, **options)
    weights.randomise(made, 1)
    return made


@pytest.mark.parametrize("normalise", [True, False])
def test_plain_routing_takes_the_best_experts(normalise: bool) -> None:
    gate = router(6, 3, normalise=normalise, scale=1.5)
    indices, chosen = (np.array(a) for a in gate(mx.array(X)))
    scores = softmax(X @ np.array(gate.weight).T)
    for at in np.ndindex(2, 5):
        best = np.argsort(-scores[at])[:3]
        expected = scores[at][best] / (scores[at][best].sum() if normalise else 1)
        np.testing.assert_array_equal(indices[at], best)
        np.testing.assert_allclose(chosen[at], 1.5 * expected, rtol=1e-4)


def test_group_limited_routing_stays_in_the_groups_with_the_best_pairs() -> None:
    gate = router(8, 3, n_group=4, topk_group=2)
    indices = np.array(gate(mx.array(X))[0])
    free = np.array(router(8, 3)(mx.array(X))[0])
    scores = softmax(X @ np.array(gate.weight).T)
    for at in np.ndindex(2, 5):
        pairs = scores[at].reshape(4, 2).sum(axis=-1)
        groups = set(np.argsort(-pairs)[:2].tolist())
        allowed = [e for e in range(8) if e // 2 in groups]
        expected = sorted(allowed, key=lambda e: -scores[at][e])[:3]
        np.testing.assert_array_equal(indices[at], expected)
    assert (indices != free).any()  # the groups did decide something


def test_all_groups_are_no_limit() -> None:
    grouped, free = router(8, 3, n_group=4, topk_group=4), router(8, 3)
    for a, b in zip(grouped(mx.array(X)), free(mx.array(X)), strict=True):
        assert mx.array_equal(a, b)


def test_stacked_experts_equal_one_swiglu_each() -> None:
    experts = moe.Experts(4, 16, 8)
    weights.randomise(experts, 3)
    indices = RNG.integers(0, 4, (2, 5, 2)).astype(np.uint32)
    share = RNG.random((2, 5, 2)).astype(np.float32)
    out = np.array(experts(mx.array(X), mx.array(indices), mx.array(share)))
    singles = []
    for e in range(4):
        single = layers.SwiGLU(16, 8)
        for name in ("gate_proj", "up_proj", "down_proj"):
            single[name].weight = experts[name][e]
        singles.append(np.array(single(mx.array(X))))
    expected = sum(
        share[..., j, None] * np.stack([singles[indices[b, t, j]][b, t] for b, t in np.ndindex(2, 5)]).reshape(X.shape)
        for j in range(2)
    )
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_shared_experts_are_added_for_every_token() -> None:
    parts = router(4, 2), moe.Experts(4, 16, 8)
    shared = layers.SwiGLU(16, 8)
    for part in (parts[1], shared):
        weights.randomise(part, 4)
    with_shared, without = moe.SparseMLP(*parts, shared), moe.SparseMLP(*parts)
    x = mx.array(X)
    np.testing.assert_allclose(with_shared(x), without(x) + shared(x), atol=1e-6)


def test_a_token_is_routed_the_same_alone_and_in_company() -> None:
    mlp = moe.SparseMLP(router(6, 2), moe.Experts(6, 16, 8))
    weights.randomise(mlp, 5)
    together = np.array(mlp(mx.array(X)))
    for b, t in np.ndindex(2, 5):
        alone = np.array(mlp(mx.array(X[b : b + 1, t : t + 1])))
        np.testing.assert_allclose(alone[0, 0], together[b, t], atol=1e-6)


@pytest.mark.parametrize(
    ("counts", "named"),
    [
        ((6, 7), "num_experts_per_tok"),
        ((6, 0), "num_experts_per_tok"),
        ((6, 2, 4), "n_group"),
        ((8, 5, 4, 2), "reaches"),
    ],
)
def test_counts_that_do_not_fit_are_refused(counts: tuple[int, ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        moe.check_routing(*counts)
