"""Which experts each side chose, and whether a difference between them is a tie.

Both sides give router logits. Two experts (or two groups of them) whose scores are equal but for rounding may be
ranked either way; from that token on the logits have nothing to do with each other. That is no error of either side,
but it must be shown: the scores on which the choice turned must lie within ``TIE``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from reference_models import glm4_moe_lite, moe

TIE = 5e-5  # softmax scores nearer than this may be ranked either way; they agree to about 1e-6


class UnexplainedFlip(AssertionError):
    """The sides chose different experts although the scores are apart. ``off``: by how many deviations the logits of
    that forward differ, once they are known."""

    off: float = float("inf")


@dataclass(frozen=True)
class Routing:
    """How a family chooses: ``top_k`` experts of the best ``topk_group`` of ``n_group`` groups. ``scored``: what is
    noted are the scores themselves (sigmoids plus a correction, which each side has), not router logits."""

    top_k: int
    n_group: int = 1
    topk_group: int = 1
    scored: bool = False


@dataclass(frozen=True)
class Flip:
    """A tie that was ranked both ways: expert layer (counted among those with experts), token, and the gap."""

    layer: int
    token: int
    gap: float

    def text(self) -> str:
        """For a report."""
        return f"expert layer {self.layer}, token {self.token}: scores {self.gap:.1e} apart"


def routing_of(config: Any) -> Routing | None:
    """The rule of a Config; None for a model without experts."""
    if not hasattr(config, "num_experts_per_tok"):
        return None
    groups = getattr(config, "n_group", 1), getattr(config, "topk_group", 1)
    return Routing(config.num_experts_per_tok, *groups, scored=isinstance(config, glm4_moe_lite.Config))


def chosen(logits: np.ndarray, rule: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Of router logits ``[T, E]``: the experts chosen, bool ``[T, E]``, and the smallest gap ``[T]`` between what was
    taken and what was left, of groups or of experts; infinite where all are taken."""
    wide = logits.astype(np.float64)
    scores = wide
    if not rule.scored:
        scores = np.exp(wide - wide.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
    tokens, experts = scores.shape
    gap = np.full(tokens, np.inf)
    if rule.topk_group < rule.n_group:
        grouped = np.sort(scores.reshape(tokens, rule.n_group, -1), axis=-1)[..., -2:].sum(axis=-1)
        taken, gap = _best(grouped, rule.topk_group)
        scores = np.where(np.repeat(taken, experts // rule.n_group, axis=-1), scores, -np.inf)
    picked, between = _best(scores, rule.top_k)
    reachable = experts // rule.n_group * rule.topk_group
    return picked, np.minimum(gap, between) if rule.top_k < reachable else gap


def _best(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` best of each row, as bool, and how far the last of them is above the first left out."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    taken = np.zeros(scores.shape, dtype=bool)
    np.put_along_axis(taken, order[:, :count], True, axis=-1)
    ranked = np.take_along_axis(scores, order, axis=-1)
    if count == scores.shape[-1]:
        return taken, np.full(len(scores), np.inf)
    return taken, ranked[:, count - 1] - ranked[:, count]


def first_flip(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], rule: Routing) -> Flip | None:
    """The tie that made the sides differ: in the first layer with other experts, the first such token; None without.

    Raises UnexplainedFlip when a choice in that layer differs though its scores, on either side, are not within TIE.
    """
    assert len(ours) == len(theirs), f"{len(ours)} expert layers ran here, {len(theirs)} there"
    for layer, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        (here, gap_here), (there, gap_there) = chosen(mine, rule), chosen(other, rule)
        differ = np.flatnonzero((here != there).any(axis=-1))
        if differ.size:
            gaps = np.maximum(gap_here, gap_there)[differ]
            # Behind its first flip a token's neighbours see another hidden state: only the first is judged.
            if gaps[0] > TIE:
                raise UnexplainedFlip(
                    f"expert layer {layer}, token {differ[0]}: other experts, though the scores are {gaps[0]:.1e} apart"
                )
            return Flip(layer, int(differ[0]), float(gaps[0]))
    return None


@contextmanager
def our_routers() -> Iterator[list[np.ndarray]]:
    """A list that fills with the router logits ``[tokens, E]`` of our expert layers, in the order of their calls."""
    seen: list[np.ndarray] = []
    original = moe.TopKRouter.__call__

    def noted(self: Any, x: mx.array) -> Any:
        logits = (x @ self.weight.T).astype(mx.float32)
        if isinstance(self, moe.SigmoidRouter):
            logits = self.ranked(self.scores(logits))
        seen.append(np.array(logits).reshape(-1, self.weight.shape[0]))
        return original(self, x)

    moe.TopKRouter.__call__ = noted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        moe.TopKRouter.__call__ = original  # type: ignore[method-assign]
