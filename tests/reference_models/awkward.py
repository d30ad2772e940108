"""What must come up when the later text families are drawn: a name, and what a Config of that kind is like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Awkward = dict[str, Callable[[Any], bool]]

GROUPED: Awkward = {
    "one layer": lambda c: c.num_hidden_layers == 1,
    "four layers": lambda c: c.num_hidden_layers == 4,
    "one KV head for several": lambda c: c.num_key_value_heads == 1 < c.num_attention_heads,
    "every head its own": lambda c: c.num_key_value_heads == c.num_attention_heads > 1,
    "three KV heads": lambda c: c.num_key_value_heads == 3,
    "tied": lambda c: c.tie_word_embeddings,
    "not tied": lambda c: not c.tie_word_embeddings,
    "odd vocabulary": lambda c: c.vocab_size % 2 == 1,
}
WINDOWED: Awkward = {
    "all sliding": lambda c: all(c.windows) and len(c.windows) > 1,
    "none sliding": lambda c: not any(c.windows) and len(c.windows) > 1,
    "both kinds": lambda c: any(c.windows) and not all(c.windows),
    "a token sees itself alone": lambda c: 1 in c.windows,
    "a window of two": lambda c: 2 in c.windows,
    "the first layer sees everything": lambda c: c.windows[0] is None and any(c.windows),
}
COHERE2 = (
    GROUPED
    | WINDOWED
    | {
        "nothing said of where": lambda c: c.sliding_window_pattern is None is c.layer_types,
        "layer by layer": lambda c: c.layer_types is not None,
        "a pattern longer than the model": lambda c: (c.sliding_window_pattern or 0) > c.num_hidden_layers,
        "logits not scaled": lambda c: c.logit_scale == 1,
    }
)
OLMO3 = (
    GROUPED
    | WINDOWED
    | {
        "nothing said of where": lambda c: c.layer_types is None,
        "stretched": lambda c: c.rope_scaling is not None and not all(c.windows),
        "not stretched": lambda c: c.rope_scaling is None,
        "a factor of its own": lambda c: c.rope_scaling is not None and c.rope_scaling.attention_factor is not None,
        "biases": lambda c: c.attention_bias,
    }
)
SCALED: Awkward = {
    "one layer": lambda c: c.num_hidden_layers == 1,
    "four layers": lambda c: c.num_hidden_layers == 4,
    "one head": lambda c: c.num_attention_heads == 1,
    "one pair": lambda c: c.qk_rope_head_dim == 2,
    "long factors": lambda c: c.max_position_embeddings > c.rope_scaling.original_max_position_embeddings,
    "short factors": lambda c: c.max_position_embeddings <= c.rope_scaling.original_max_position_embeddings,
    "both alike, as published": lambda c: c.rope_scaling.short_factor == c.rope_scaling.long_factor,
    "the published scale of embeddings": lambda c: c.scale_emb == 12,
    "logits scaled up": lambda c: c.dim_model_base > c.hidden_size,
    "tied": lambda c: c.tie_word_embeddings,
    "biases": lambda c: c.attention_bias,
}
SIGMOID: Awkward = {
    "one layer": lambda c: c.num_hidden_layers == 1,
    "four layers": lambda c: c.num_hidden_layers == 4,
    "one head": lambda c: c.num_attention_heads == 1,
    "one expert": lambda c: c.n_routed_experts == 1,
    "one of several experts chosen": lambda c: c.num_experts_per_tok == 1 < c.n_routed_experts,
    "all experts chosen": lambda c: c.num_experts_per_tok == c.n_routed_experts > 1,
    "some groups": lambda c: 1 < c.topk_group < c.n_group,
    "every group": lambda c: c.topk_group == c.n_group > 1,
    "no dense layer": lambda c: c.first_k_dense_replace == 0,
    "one sparse layer of four": lambda c: c.first_k_dense_replace == 3,
    "no q lora": lambda c: c.q_lora_rank is None,
    "not interleaved": lambda c: not c.rope_interleave,
    "scores not renormalised": lambda c: not c.norm_topk_prob,
    "tied": lambda c: c.tie_word_embeddings,
    "biases": lambda c: c.attention_bias,
    "values narrower than keys": lambda c: c.v_head_dim < c.qk_nope_head_dim,
}
