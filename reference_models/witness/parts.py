"""What the families are made of, in NumPy float64: norm, linear maps, attention over a visibility matrix, experts.

One sequence, no batch: hidden states are ``[S, hidden]``, heads ``[H, S, D]``. Names of weights are those of the
published checkpoints, with the experts of a layer stacked in three arrays.

Sources: RMSNorm (arXiv 1910.07467), SwiGLU (arXiv 2002.05202), grouped-query attention (arXiv 2305.13245), Qwen3's
routing (arXiv 2505.09388), DeepSeek-V2's groups of experts (arXiv 2405.04434), DeepSeek-V3's correction bias (arXiv
2412.19437).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Weights = Mapping[str, Array]

#: Queries that attend at once, over the keys that one of them sees: a program may have processed a thousand tokens, of
#: which a bounded cache showed few at a time.
BLOCK = 64
#: Multiplications from which OpenBLAS wakes its threads. On busy cores (several test workers) they wait for each other
#: far longer than they work: 0.2 s for 24 tokens where one thread takes 1 ms.
THREADED = 1 << 18


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis."""
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight)


def product(x: Array, matrix: Array) -> Array:
    """``x M^T``, ``[S, in]`` by ``[out, in]``; of tiny models in blocks of rows that one thread does."""
    rows = THREADED // matrix.size
    if len(x) <= rows or rows < 2:
        return np.asarray(x @ matrix.T)
    return np.concatenate([x[first : first + rows] @ matrix.T for first in range(0, len(x), rows)])


def linear(x: Array, weights: Weights, name: str) -> Array:
    """``x W^T``, plus the bias where there is one."""
    out = product(x, weights[f"{name}.weight"])
    bias = weights.get(f"{name}.bias")
    return out if bias is None else out + bias


def silu(x: Array) -> Array:
    """``x * sigmoid(x)``."""
    return x * sigmoid(x)


def sigmoid(x: Array) -> Array:
    """``1 / (1 + exp(-x))``, as a tanh, which cannot overflow."""
    return np.asarray(0.5 * np.tanh(0.5 * x) + 0.5)


def swiglu(x: Array, weights: Weights, name: str) -> Array:
    """``down(silu(gate x) * up x)``."""
    gated = silu(linear(x, weights, f"{name}.gate_proj")) * linear(x, weights, f"{name}.up_proj")
    return linear(gated, weights, f"{name}.down_proj")


def heads_of(x: Array, size: int) -> Array:
    """``[S, H * size] -> [H, S, size]``."""
    return x.reshape(len(x), -1, size).swapaxes(0, 1)


def attend(q: Array, k: Array, v: Array, visible: Array, scale: float) -> Array:
    """Softmax attention, ``q [H, S, Dk]``, ``k [Hk, S, Dk]``, ``v [Hk, S, Dv]`` -> ``[S, H * Dv]``.

    Query head h reads KV head ``h // (H / Hk)``. ``visible [S, S]``: may row i see column j? None lies behind the
    diagonal, and every row sees at least itself.
    """
    groups, count = len(k), q.shape[1]
    grouped = q.reshape(groups, -1, count, q.shape[-1])
    out = np.empty((count, *grouped.shape[:2], v.shape[-1]))
    for first in range(0, count, BLOCK):
        last = min(first + BLOCK, count)
        seen = np.flatnonzero(visible[first:last].any(axis=0))
        scores = (grouped[:, :, first:last] @ k[:, None, seen].swapaxes(-1, -2)) * scale
        scores = np.where(visible[first:last, seen], scores, -np.inf)
        weight = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weight /= weight.sum(axis=-1, keepdims=True)
        out[first:last] = np.moveaxis(weight @ v[:, None, seen], 2, 0)
    return out.reshape(count, -1)


def experts(x: Array, weights: Weights, name: str, rule: Routing) -> tuple[Array, Array]:
    """Routed experts (and the shared ones, if there are any): ``[S, hidden]`` kept; and the gaps ``[S]`` of the choice.

    Softmax over all experts; the best ``top_k``, those of the best groups where there are groups, summed by their
    scores (renormalised to sum 1, or not) times ``scale``. With a correction bias the scores are sigmoids, one for each
    expert, and the choice is by score plus bias.
    """
    logits = product(x, weights[f"{name}.gate.weight"])
    correction = weights.get(f"{name}.gate.e_score_correction_bias")
    if correction is None:
        scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        taken, gaps = rule.choose(scores)
    else:
        scores = sigmoid(logits)
        taken, gaps = rule.choose(scores + correction)
    share = np.where(taken, scores, 0.0)
    if rule.normalise:
        share /= share.sum(axis=-1, keepdims=True)
    out = np.zeros_like(x)
    stacked = [weights[f"{name}.experts.{part}"] for part in ("gate_proj", "up_proj", "down_proj")]
    for expert in np.flatnonzero(taken.any(axis=0)):
        here = np.flatnonzero(taken[:, expert])
        gate, up, down = (matrix[expert] for matrix in stacked)
        rows = x[here]
        grown = product(silu(product(rows, gate)) * product(rows, up), down)
        out[here] += grown * (share[here, expert, None] * rule.scale)
    if f"{name}.shared_experts.gate_proj.weight" in weights:
        out += swiglu(x, weights, f"{name}.shared_experts")
    return out, gaps


class Routing:
    """``top_k`` experts of the best ``topk_group`` of ``n_group`` groups; a group counts its two best experts."""

    def __init__(
        self, top_k: int, normalise: bool = True, scale: float = 1.0, n_group: int = 1, topk_group: int = 1
    ) -> None:
        self.top_k, self.normalise, self.scale = top_k, normalise, scale
        self.n_group, self.topk_group = n_group, topk_group

    def choose(self, scores: Array) -> tuple[Array, Array]:
        """Of ``scores [S, E]``: who is taken, bool ``[S, E]``, and by how much the last taken leads, ``[S]``."""
        gaps = np.full(len(scores), np.inf)
        open_to = np.ones(scores.shape, bool)
        if self.topk_group < self.n_group:
            groups = scores.reshape(len(scores), self.n_group, -1)
            totals = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)
            best, gaps = _best(totals, self.topk_group, np.ones(totals.shape, bool))
            open_to = np.repeat(best, groups.shape[-1], axis=-1)
        taken, between = _best(scores, self.top_k, open_to)
        return taken, np.minimum(gaps, between)


def _best(scores: Array, count: int, open_to: Array) -> tuple[Array, Array]:
    """The ``count`` largest of each row among ``open_to``, and how far the last of them lies above the next: infinite
    where nothing is left."""
    ranked = np.where(open_to, scores, -np.inf)
    order = np.argsort(-ranked, axis=-1, kind="stable")
    taken = np.zeros(scores.shape, bool)
    np.put_along_axis(taken, order[:, :count], True, axis=-1)
    if count == scores.shape[-1]:
        return taken, np.full(len(scores), np.inf)
    pair = np.take_along_axis(ranked, order[:, count - 1 : count + 1], axis=-1)
    return taken, pair[:, 0] - pair[:, 1]
