"""Random models of the later text families, made by transformers: a function for each, by the family's name."""

from __future__ import annotations

from typing import Any

#: Of every maker of a small model.
BASE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def transformers() -> Any:
    """The package, which is not installed everywhere."""
    import transformers as package

    return package


def cohere2() -> Any:
    fields = {
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    return transformers().Cohere2ForCausalLM(transformers().Cohere2Config(**BASE | fields))


def olmo3() -> Any:
    default = {"rope_type": "default", "rope_theta": 100.0}
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
    fields = {
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "rope_parameters": {"full_attention": yarn, "sliding_attention": default},
    }
    return transformers().Olmo3ForCausalLM(transformers().Olmo3Config(**BASE | fields))


def minicpm3() -> Any:
    fields = {
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "scale_emb": 2,
        "dim_model_base": 16,
        "max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 100.0,
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [2.0, 3.0, 4.0, 6.0],
            "original_max_position_embeddings": 8,
        },
    }
    return transformers().MiniCPM3ForCausalLM(transformers().MiniCPM3Config(**BASE | fields))


def glm4_moe_lite() -> Any:
    fields = {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }
    return transformers().Glm4MoeLiteForCausalLM(transformers().Glm4MoeLiteConfig(**BASE | fields))


TEXT_MAKERS = {
    "cohere2": cohere2,
    "glm4_moe_lite": glm4_moe_lite,
    "minicpm3": minicpm3,
    "olmo3": olmo3,
}
