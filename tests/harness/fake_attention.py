"""Queries, keys, values and output of the calls of a fake target: any numbers, but attention all the same."""

from __future__ import annotations

import numpy as np

from harness.target import AttentionCall, AttentionValues


def attention_values(call: AttentionCall, off: bool, rows: int) -> AttentionValues | None:
    """Of so many rows of a batch, another way than the judge's; ``off``: one number is wrong by a thousandth."""
    if call.key_len != call.value_len or call.key_len < 1:
        return None
    numbers = np.random.default_rng(call.query_len * 1000 + call.key_len)
    queries = numbers.normal(size=(rows, call.heads, call.query_len, 3))
    keys, values = (numbers.normal(size=(rows, call.kv_heads, call.key_len, width)) for width in (3, 2))
    hidden = np.zeros((rows, 1, call.query_len, call.key_len), bool)
    if call.mask == "causal":
        hidden = hidden | ~np.tri(call.query_len, call.key_len, call.key_len - call.query_len, dtype=bool)
    elif call.shown is not None:
        if call.shown.shape[-1] != call.key_len or call.shown.shape[-2] not in (1, call.query_len):
            return None
        hidden = hidden | ~call.shown[:, :1]
    group = np.arange(call.heads) * call.kv_heads // call.heads
    weights = np.exp(np.einsum("bhqd,bhkd->bhqk", queries, keys[:, group]) / 2) * ~hidden
    with np.errstate(invalid="ignore"):
        out = np.einsum("bhqk,bhkd->bhqd", weights, values[:, group]) / weights.sum(-1)[..., None]
    out[0, -1, -1, -1] += 0.001 * off
    return AttentionValues(queries, keys, values, out, 0.5, np.where(hidden, -np.inf, 0.0))
