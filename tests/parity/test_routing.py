"""A routing flip is a tie only if the scores say so."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from reference_models import moe
from tests.parity.routing import Routing, UnexplainedFlip, chosen, first_flip, our_routers

CLEAR = np.array([[3.0, 2.0, 1.0], [0.0, 1.0, 2.0]])
TIE = np.array([[3.0, 2.0, 1.0], [1.0, 1.00001, 2.0]])
OTHER = np.array([[3.0, 2.0, 1.0], [1.00001, 1.0, 2.0]])
TWO = Routing(2)


def test_a_flip_must_be_a_tie() -> None:
    assert first_flip([CLEAR], [CLEAR + 1e-6], TWO) is None
    flip = first_flip([CLEAR, TIE], [CLEAR, OTHER], TWO)
    assert flip is not None and (flip.layer, flip.token) == (1, 1) and 0 < flip.gap < 1e-5
    assert "layer 1, token 1" in flip.text()
    with pytest.raises(UnexplainedFlip, match="layer 0, token 0"):
        first_flip([CLEAR], [CLEAR[:, ::-1]], TWO)


def test_a_tie_on_one_side_alone_explains_nothing() -> None:
    apart = np.array([[3.0, 2.0, 1.0], [1.5, 1.0, 2.0]])
    with pytest.raises(UnexplainedFlip):
        first_flip([TIE], [apart], TWO)


def test_groups_can_tie_as_well() -> None:
    rule = Routing(1, n_group=2, topk_group=1)
    first = np.log(np.array([[0.30, 0.20, 0.3000001, 0.2]]))
    other = np.log(np.array([[0.3000001, 0.20, 0.30, 0.2]]))
    flip = first_flip([first], [other], rule)
    assert flip is not None and flip.gap < 1e-6
    # All experts of the group are taken: only the groups' gap counts.
    every = Routing(2, n_group=2, topk_group=1)
    assert chosen(first, every)[1][0] < 1e-6
    assert np.isinf(chosen(first, Routing(4))[1]).all()


@pytest.mark.parametrize("rule", [Routing(1), Routing(3), Routing(4, 4, 2), Routing(6, 4, 3), Routing(8)])
def test_the_choice_is_that_of_the_model(rule: Routing) -> None:
    router = moe.TopKRouter(5, 8, rule.top_k, n_group=rule.n_group, topk_group=rule.topk_group)
    router.weight = mx.random.normal((8, 5), key=mx.random.key(0))
    x = mx.random.normal((1, 40, 5), key=mx.random.key(1))
    with our_routers() as seen:
        indices, _ = router(x)
    expected = np.zeros((40, 8), dtype=bool)
    np.put_along_axis(expected, np.array(indices)[0], True, axis=-1)
    np.testing.assert_array_equal(chosen(seen[0], rule)[0], expected)
