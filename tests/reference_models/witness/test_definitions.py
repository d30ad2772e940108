"""The witness by hand, and what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference_models import registry, witness
from reference_models.witness import rotary
from reference_models.witness.parts import Routing, attend

TWO = np.tri(2, dtype=bool)


def sequence(**changes: Any) -> witness.Sequence:
    return witness.Sequence(**{"tokens": np.array([1, 2]), "positions": np.arange(2), "visible": (TWO,)} | changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"tokens": np.array([], int)}, "tokens must be"),
        ({"tokens": np.array([[1, 2]])}, "tokens must be"),
        ({"positions": np.arange(3)}, "positions of 2 tokens"),
        ({"positions": np.zeros((2, 2))}, "positions of 2 tokens"),
        ({"visible": (TWO, np.tri(3, dtype=bool))}, r"visible\[1\] must be bool"),
        ({"visible": (TWO.astype(float),)}, r"visible\[0\] must be bool"),
        ({"visible": (TWO & ~np.eye(2, dtype=bool),)}, r"visible\[0\]: token 0 does not see itself"),
        ({"visible": (np.ones((2, 2), bool),)}, r"visible\[0\] shows a token one that comes later"),
        ({"features": np.zeros((2, 4))}, "features need is_feature"),
        ({"deepstack": (np.zeros((2, 4)),)}, "features need is_feature"),
    ],
)
def test_input_that_does_not_fit_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        sequence(**changes)


def test_a_forward_that_does_not_fit_is_refused() -> None:
    config = registry.variants("nemotron_nas")[0].config  # one layer
    with pytest.raises(ValueError, match="no witness of family 'qwen4'"):
        witness.forward("qwen4", config, {}, sequence())
    with pytest.raises(ValueError, match="got 2 visibility matrices for 1 attention layers"):
        witness.forward("nemotron_nas", config, {}, sequence(visible=(TWO, TWO)))
    with pytest.raises(ValueError, match="storages rows, int8, affine8, affine4, not 'int4'"):
        witness.forward("nemotron_nas", config, {}, sequence(), "int4")
    with pytest.raises(ValueError, match="one position per token"):
        sequence(positions=np.zeros((3, 2))).line()
    assert sequence().places().tolist() == [[0, 1]] * 3


def test_heads_read_their_group_and_rows_what_they_see() -> None:
    """Four query heads over two KV heads; with equal keys attention is the mean of the visible values."""
    values = np.array([[[1.0], [3.0], [5.0]], [[10.0], [30.0], [50.0]]])
    visible = np.array([[1, 0, 0], [0, 1, 0], [1, 0, 1]], bool)
    out = attend(np.ones((4, 3, 2)), np.ones((2, 3, 2)), values, visible, 1.0)
    assert np.allclose(out, [[1, 1, 10, 10], [3, 3, 30, 30], [3, 3, 30, 30]])


def test_scores_are_scaled_before_the_softmax() -> None:
    q, k = np.array([[[0.0], [2.0]]]), np.array([[[1.0], [2.0]]])
    out = attend(q, k, np.array([[[0.0], [1.0]]]), TWO, 0.5)
    assert out[1, 0] == pytest.approx(np.exp(2) / (np.exp(1) + np.exp(2)))


def test_large_scores_do_not_overflow() -> None:
    q, k = np.array([[[0.0], [1e4]]]), np.array([[[1.0], [2.0]]])
    assert attend(q, k, np.array([[[0.0], [1.0]]]), TWO, 1.0).tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize(
    ("rule", "scores", "taken", "gap"),
    [
        (Routing(1), [0.1, 0.6, 0.3], [1], 0.3),
        (Routing(2), [0.1, 0.6, 0.3], [1, 2], 0.2),
        (Routing(3), [0.1, 0.6, 0.3], [0, 1, 2], np.inf),
        (Routing(1, n_group=2, topk_group=1), [0.3, 0.1, 0.25, 0.26], [3], 0.01),  # the best pair, not the best expert
        (Routing(2, n_group=2, topk_group=1), [0.3, 0.1, 0.25, 0.26], [2, 3], 0.11),  # all of the group: groups decide
        (Routing(2, n_group=2, topk_group=2), [0.3, 0.1, 0.25, 0.26], [0, 3], 0.01),
    ],
)
def test_experts_are_chosen(rule: Routing, scores: list[float], taken: list[int], gap: float) -> None:
    chosen, gaps = rule.choose(np.array([scores]))
    assert np.flatnonzero(chosen[0]).tolist() == taken and gaps[0] == pytest.approx(gap)


def test_sections_turn_pairs_by_their_axis() -> None:
    places, plain = np.array([[1.0], [10.0], [100.0]]), np.ones(8)
    chunked = rotary.mrope_angles(places, plain, (3, 4, 1), interleaved=False)
    assert chunked.tolist() == [[1, 1, 1, 10, 10, 10, 10, 100]]
    interleaved = rotary.mrope_angles(places, plain, (4, 2, 2), interleaved=True)
    assert interleaved.tolist() == [[1, 10, 100, 1, 10, 100, 1, 1]]


def test_pairs_are_halves_or_neighbours() -> None:
    quarter = np.array([[np.pi / 2, 0]])
    x = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    assert np.allclose(rotary.turn(x, quarter), [[[-3, 2, 1, 4]]])
    assert np.allclose(rotary.turn(x, quarter, adjacent=True, amplitude=2), [[[-4, 2, 6, 8]]])
