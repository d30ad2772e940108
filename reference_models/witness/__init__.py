"""The families once more, in NumPy float64, written from their published definitions: an independent witness.

One forward without a cache, without chunks and without offsets: every token gets its position and its row of a
visibility matrix, and that is all. It shares no code with the models beside it (no MLX, no RoPE, no mask, no layer of
theirs) and no kernel with whatever is judged. Quantised weights and vision towers are out of scope: features of images
are given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reference_models.witness import cohere2, glm4_moe_lite, minicpm3, mistral4, nemotron_nas, olmo3, qwen
from reference_models.witness.parts import Array, Weights, product, rms_norm
from reference_models.witness.rows import Gaps, Rows
from reference_models.witness.sequence import Sequence

_FAMILIES: Mapping[str, Callable[[Any, Weights, Sequence, Rows, Gaps], Array]] = {
    "cohere2": cohere2.hidden_states,
    "glm4_moe_lite": glm4_moe_lite.hidden_states,
    "minicpm3": minicpm3.hidden_states,
    "mistral4": mistral4.hidden_states,
    "nemotron_nas": nemotron_nas.hidden_states,
    "olmo3": olmo3.hidden_states,
    "qwen2_vl": qwen.hidden_states,
    "qwen3_vl": qwen.hidden_states,
    "qwen3_vl_moe": qwen.hidden_states,
}


def _logits(config: Any, weights: Weights, x: Array) -> Array:
    """``[S, vocab]`` behind the last layer, as most families have it: a norm and a matrix."""
    x = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)
    head = "model.embed_tokens" if config.tie_word_embeddings else "lm_head"
    return product(x, weights[f"{head}.weight"])


#: Families whose way from the last layer to the logits is another one.
_LOGITS: Mapping[str, Callable[[Any, Weights, Array], Array]] = {"cohere2": cohere2.logits, "minicpm3": minicpm3.logits}


@dataclass(frozen=True, eq=False)
class Testimony:
    """``logits`` float64 ``[S, vocab]``; ``gaps``: how near each token came to another choice (see ``rows.Gaps``)."""

    logits: Array
    gaps: Gaps


def forward(family: str, config: Any, weights: Weights, given: Sequence, storage: str | Array = "rows") -> Testimony:
    """The logits of all tokens at once.

    ``config``: the family's, read by the names of the published config.json; ``weights``: float64, by the names of the
    checkpoint; ``storage``: of the cache that is imitated, or ``[S]``, of the rows of each token. Raises ValueError for
    a family without a witness, and when the number of visibility matrices is not that of the attention layers.
    """
    if family not in _FAMILIES:
        raise ValueError(f"no witness of family {family!r}: there are {', '.join(_FAMILIES)}")
    blocks = getattr(config, "block_configs", None)
    layers = config.num_hidden_layers if blocks is None else sum(not _replaced(block.attention) for block in blocks)
    if len(given.visible) != layers:
        raise ValueError(f"got {len(given.visible)} visibility matrices for {layers} attention layers")
    gaps = Gaps(len(given.tokens))
    x = _FAMILIES[family](config, weights, given, Rows(storage, gaps), gaps)
    return Testimony(_LOGITS.get(family, _logits)(config, weights, x), gaps)


def _replaced(attention: Any) -> bool:
    return bool(attention.no_op or attention.replace_with_linear)


__all__ = ["Gaps", "Sequence", "Testimony", "forward"]
