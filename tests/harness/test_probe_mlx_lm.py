"""The probe on our families as mlx-lm ships them, with mlx-lm's own caches."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from harness.ledger import SequenceLedger
from harness.oracle import visible_set
from harness.probe import Probe, Record

pytest.importorskip("mlx_lm", reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'")

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 40,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "head_dim": 8,
}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 16,
    "norm_topk_prob": True,
}
MISTRAL4 = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "routed_scaling_factor": 1.0,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "norm_topk_prob": True,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "rope_interleave": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "llama_4_scaling_beta": 0.1,
    },
}
GLM = {
    **{name: value for name, value in TEXT.items() if name != "head_dim"},
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
MINICPM3 = {
    **TEXT,
    "dim_model_base": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "scale_depth": 1.4,
    "scale_emb": 12.0,
    "rope_scaling": {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 512},
}
ATTENDING = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
NEMOTRON = {
    **TEXT,
    "num_hidden_layers": 4,
    "block_configs": [
        ATTENDING,
        {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
        {"attention": {"replace_with_linear": True}, "ffn": {"no_op": True}},
        {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
    ],
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere2": ("cohere2", {**TEXT, "sliding_window": 64, "sliding_window_pattern": 2}),
    "glm4_moe_lite": ("glm4_moe_lite", GLM),
    "minicpm3": ("minicpm3", MINICPM3),
    "mistral4": ("mistral4", MISTRAL4),
    "nemotron_nas": ("nemotron-nas", NEMOTRON),
    "olmo3": ("olmo3", {**TEXT, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2_vl": ("qwen2_vl", {"text_config": {**TEXT, "model_type": "qwen2"}}),
    "qwen3_vl": ("qwen3_vl", {"text_config": {**TEXT, "model_type": "qwen3"}}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {"text_config": {**TEXT, **MOE, "model_type": "qwen3_moe"}}),
}


def build(family: str, **changes: Any) -> Any:
    module_name, config = FAMILIES[family]
    module = importlib.import_module(f"mlx_lm.models.{module_name}")
    if changes:
        config = {"text_config": {**config["text_config"], **changes}}
    model = module.Model(module.ModelArgs.from_dict({"model_type": module_name, **config}))
    mx.eval(model.parameters())
    return model


def caches(model: Any) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    return make_prompt_cache(model)


def _visible(before: int, tokens: int) -> np.ndarray[Any, Any]:
    """What new tokens may see behind others, none of which was trimmed."""
    ledger = SequenceLedger()
    ledger.append(before)
    return visible_set(ledger.append(tokens))


def forward(model: Any, cache: list[Any], tokens: int) -> Record:
    with Probe().watching() as record:
        mx.eval(model(mx.arange(tokens)[None] % 40, cache=cache))
    return record


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_keys_and_positions_of_a_prefill_a_chunk_and_a_decode(family: str) -> None:
    model = build(family)
    cache = caches(model)
    offset = 0
    for tokens in (6, 3, 1, 1, 4):
        record = forward(model, cache, tokens)
        calls = record.attention()
        assert len(calls) == 2  # an attention call of every layer that attends, and nothing else
        visible = _visible(offset, tokens)
        for call in calls:
            assert (call.query_len, call.key_len, call.value_len) == (tokens, offset + tokens, offset + tokens)
            assert call.mask_keys in (None, offset + tokens)
            if call.shown is not None and not call.scores:
                assert np.array_equal(np.broadcast_to(call.shown[0, 0], visible.shape), visible)
            if call.scores:
                assert (
                    family in ("glm4_moe_lite", "mistral4") and tokens == 1
                )  # an MLA decode adds its rotated part as scores
        turns = record.positions()
        assert turns  # queries and keys of every layer
        for turn in turns:
            assert turn.kind == "rope" and turn.positions.tolist() == list(range(offset, offset + tokens))
        offset += tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_their_chunks_pass_a_word_and_no_mask(family: str) -> None:
    """So with mlx-lm's dense cache nothing explicit is tested: a mask property must come out VACUOUS there. Of
    glm4_moe_lite the scores of the rotated part are the mask, and hide what must be hidden."""
    model = build(family)
    cache = caches(model)
    calls = [call for tokens in (4, 3) for call in forward(model, cache, tokens).attention()]
    expected: list[tuple[str, int | None]] = [("causal", None)] * 4
    if family == "glm4_moe_lite":
        expected = [("additive", keys) for keys in (4, 4, 7, 7)]
    assert [(call.mask, call.mask_keys) for call in calls] == expected


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)], ids=["grouped", "ungrouped"])
def test_attention_over_a_quantised_cache_is_seen(heads: tuple[int, int]) -> None:
    from mlx_lm.models.cache import QuantizedKVCache

    # qwen2's head_dim is hidden / heads and must be a multiple of the group
    model = build("qwen2_vl", hidden_size=32 * heads[0], num_attention_heads=heads[0], num_key_value_heads=heads[1])
    cache = [QuantizedKVCache(group_size=32, bits=8) for _ in model.layers]
    offset = 0
    for tokens in (6, 3, 1):
        record = forward(model, cache, tokens)
        calls = record.attention()
        assert [call.kind for call in calls] == ["quantised"] * 2
        visible = _visible(offset, tokens)
        for call in calls:
            assert (call.query_len, call.key_len) == (tokens, offset + tokens)
            assert (call.heads, call.kv_heads) == heads
            assert call.shown is not None and call.shown.shape == (1, heads[0], tokens, offset + tokens)
            assert (call.shown == visible).all()
        assert all(turn.positions[0] == offset for turn in record.positions())
        offset += tokens
