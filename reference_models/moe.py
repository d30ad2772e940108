"""Mixture of experts: routers and the stacked SwiGLU experts.

Deterministic: experts are ranked by a full sort and always summed in the order of their rank. Routing
follows Qwen3-MoE (arXiv 2505.09388) and, for the groups, DeepSeek-V2 (arXiv 2405.04434) as Mistral 4's
published code does.
"""

from typing import Any

import mlx.core as mx
from mlx import nn


class TopKRouter(nn.Module):
    """Softmax over all experts, then the best ``top_k``, optionally only from the best ``topk_group`` groups.

    A group is scored by the sum of its two best experts. Weights are the raw softmax values of the chosen
    experts, renormalised to sum 1 if ``normalise``, times ``scale``. Raises ValueError when the counts do
    not fit.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        normalise: bool = True,
        scale: float = 1.0,
        n_group: int = 1,
        topk_group: int = 1,
    ):
        super().__init__()
        check_routing(experts, top_k, n_group, topk_group)
        self.weight = mx.zeros((experts, hidden))
        self.top_k, self.normalise, self.scale = top_k, normalise, scale
        self.n_group, self.topk_group = n_group, topk_group

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """``x [.., hidden]`` -> expert indices and their weights (in x's dtype), ``[.., top_k]``."""
        scores = self.scores((x @ self.weight.T).astype(mx.float32))
        ranked = self.ranked(scores)
        choice = ranked if self.topk_group == self.n_group else self._within_best_groups(ranked)
        indices = mx.argsort(-choice, axis=-1)[..., : self.top_k]
        weights = mx.take_along_axis(scores, indices, axis=-1)
        if self.normalise:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return indices, (weights * self.scale).astype(x.dtype)

    def scores(self, logits: mx.array) -> mx.array:
        """What weighs an expert: ``logits [.., E]`` kept."""
        return mx.softmax(logits, axis=-1)

    def ranked(self, scores: mx.array) -> mx.array:
        """What experts and groups are chosen by."""
        return scores

    def _within_best_groups(self, scores: mx.array) -> mx.array:
        """``scores [.., E]`` with -inf outside the chosen groups."""
        grouped = scores.reshape(*scores.shape[:-1], self.n_group, -1)
        best_two = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
        rank = mx.argsort(mx.argsort(-best_two, axis=-1), axis=-1)
        return mx.where((rank < self.topk_group)[..., None], grouped, -mx.inf).reshape(scores.shape)


class SigmoidRouter(TopKRouter):
    """The router of DeepSeek-V3 (arXiv 2412.19437): every expert has a score of its own, between 0 and 1.

    Experts, and groups of them, are chosen by score plus ``e_score_correction_bias [E]``, which balances their load;
    what was chosen weighs by its score alone.
    """

    def __init__(self, hidden: int, experts: int, top_k: int, **rule: Any):
        super().__init__(hidden, experts, top_k, **rule)
        self.e_score_correction_bias = mx.zeros((experts,))

    def scores(self, logits: mx.array) -> mx.array:
        return mx.sigmoid(logits)

    def ranked(self, scores: mx.array) -> mx.array:
        return scores + self.e_score_correction_bias


def check_routing(experts: int, top_k: int, n_group: int = 1, topk_group: int = 1) -> None:
    """Raise ValueError unless ``topk_group`` of ``n_group`` groups hold ``top_k`` experts."""
    if n_group < 1 or experts % n_group:
        raise ValueError(f"n_group ({n_group}) must divide the number of experts ({experts})")
    if not 1 <= topk_group <= n_group:
        raise ValueError(f"topk_group ({topk_group}) must lie in 1..n_group ({n_group})")
    if n_group > 1 and experts // n_group < 2:
        raise ValueError(f"a group needs two experts to be scored; {experts} experts in {n_group} groups have fewer")
    reachable = experts // n_group * topk_group
    if not 1 <= top_k <= reachable:
        raise ValueError(f"num_experts_per_tok ({top_k}) must lie in 1..{reachable}, the experts that a token reaches")


class Experts(nn.Module):
    """All routed experts, stacked in three tensors.

    ``gate_proj``, ``up_proj``: ``[E, intermediate, hidden]``; ``down_proj``: ``[E, hidden, intermediate]``.
    Checkpoints store either one Linear per expert or a fused ``gate_up_proj``: stack the first, split the
    second.
    """

    def __init__(self, experts: int, hidden: int, intermediate: int):
        super().__init__()
        self.gate_proj = mx.zeros((experts, intermediate, hidden))
        self.up_proj = mx.zeros((experts, intermediate, hidden))
        self.down_proj = mx.zeros((experts, hidden, intermediate))

    def __call__(self, x: mx.array, indices: mx.array, weights: mx.array) -> mx.array:
        """``x [.., hidden]`` kept: experts ``indices [.., k]`` summed by ``weights [.., k]``."""
        rows = x[..., None, None, :]  # one 1 x hidden matrix per token, broadcast over its k experts
        gate = self._times("gate_proj", rows, indices)
        up = self._times("up_proj", rows, indices)
        down = self._times("down_proj", nn.silu(gate) * up, indices)
        return (down.squeeze(-2) * weights[..., None]).sum(axis=-2)

    def _times(self, name: str, rows: mx.array, indices: mx.array) -> mx.array:
        """``rows`` times the chosen experts' matrices; a quantised checkpoint puts a callable in the array's place."""
        matrix = self[name]
        if isinstance(matrix, mx.array):
            return mx.gather_mm(rows, matrix.swapaxes(-1, -2), rhs_indices=indices)
        return matrix(rows, indices)


class SparseMLP(nn.Module):
    """Router ``gate``, ``experts`` and, if given, ``shared_experts`` for all. ``[.., hidden]`` kept."""

    def __init__(self, router: TopKRouter, experts: Experts, shared_experts: nn.Module | None = None):
        super().__init__()
        self.gate = router
        self.experts = experts
        if shared_experts is not None:
            self.shared_experts = shared_experts

    def __call__(self, x: mx.array) -> mx.array:
        out = self.experts(x, *self.gate(x))
        return out + self.shared_experts(x) if "shared_experts" in self else out
