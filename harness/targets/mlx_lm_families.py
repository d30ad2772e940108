"""The families of mlx-lm whose caches all hold keys."""

from __future__ import annotations

from harness.targets.mlx_lm_family import LATENT, TEXT, Family, text

WINDOW = 12
SLIDING, FULL = "sliding_attention", "full_attention"

ATTENDING = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
LINEAR = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}
NOTHING = {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}}

FAMILIES: dict[str, Family | tuple[Family, ...]] = {
    "llama": Family(text()),
    "qwen3": Family(text()),
    "qwen2": Family(text()),
    "nemotron_nas": (
        Family(
            text(num_hidden_layers=4, block_configs=[ATTENDING, NOTHING, LINEAR, ATTENDING]),
            module="nemotron-nas",
            calls=((0, 0), (3, 2)),
        ),
        Family(
            text(num_hidden_layers=4, block_configs=[LINEAR, ATTENDING, NOTHING, ATTENDING]),
            module="nemotron-nas",
            calls=((1, 1), (3, 2)),
            variant="linear-first",
        ),
    ),
    "cohere2": Family(
        text(layer_norm_eps=1e-5, sliding_window=WINDOW, sliding_window_pattern=2, num_hidden_layers=4),
        windows=(WINDOW, None, WINDOW, None),
    ),
    "olmo3": Family(
        text(sliding_window=WINDOW, layer_types=[SLIDING, FULL, SLIDING]),
        windows=(WINDOW, None, WINDOW),
    ),
    "gemma3_text": Family(
        text(
            num_hidden_layers=4,
            query_pre_attn_scalar=8,
            rope_local_base_freq=1000.0,
            sliding_window=WINDOW,
            sliding_window_pattern=2,
        ),
        windows=(WINDOW, None, WINDOW, None),
    ),
    "ministral3": Family(
        text(
            layer_types=[SLIDING, FULL, SLIDING],
            sliding_window=WINDOW,
            rope_parameters={
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 16,
            },
        ),
        windows=(WINDOW, None, WINDOW),
    ),
    "mistral4": Family(
        text(
            head_dim=None,
            moe_intermediate_size=16,
            n_shared_experts=1,
            n_routed_experts=4,
            routed_scaling_factor=1.0,
            norm_topk_prob=True,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_group=1,
            rope_interleave=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.1,
            },
            **LATENT,
        ),
        attention="latent",
    ),
    "glm4_moe_lite": Family(
        text(head_dim=None, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, **LATENT),
        attention="latent",
    ),
    "minicpm3": Family(
        text(
            dim_model_base=16,
            scale_depth=1.4,
            scale_emb=12.0,
            rope_scaling={
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 512,
            },
            **LATENT,
        ),
        attention="latent",
    ),
    "qwen2_vl": Family({"text_config": {**TEXT, "model_type": "qwen2"}}, limits=("text alone: no image",)),
    "qwen3_vl": Family({"text_config": {**TEXT, "model_type": "qwen3"}}, limits=("text alone: no image",)),
    "qwen3_vl_moe": Family(
        {
            "text_config": text(
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=1,
                mlp_only_layers=[],
                moe_intermediate_size=16,
                norm_topk_prob=True,
                model_type="qwen3_moe",
            )
        },
        limits=("text alone: no image",),
    ),
    "gpt_oss": Family(
        text(
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL, SLIDING],
            intermediate_size=32,
        ),
        windows=(WINDOW, None, WINDOW),
    ),
    "exaone4": Family(
        text(
            num_hidden_layers=4,
            rope_scaling={"rope_type": "default"},
            sliding_window=WINDOW,
            sliding_window_pattern="LG",
        ),
        windows=(WINDOW, None, WINDOW, None),
    ),
    "mellum": Family(
        text(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            norm_topk_prob=True,
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL, SLIDING],
            rope_parameters={kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in (SLIDING, FULL)},
        ),
        windows=(WINDOW, None, WINDOW),
    ),
    "step3p5": Family(
        text(
            num_attention_groups=2,
            sliding_window=WINDOW,
            layer_types=[FULL, SLIDING, SLIDING],
            moe_num_experts=4,
            moe_top_k=2,
            moe_intermediate_size=16,
            share_expert_dim=16,
            moe_layers_enum="1,2",
        ),
        windows=(None, WINDOW, WINDOW),
    ),
    "exaone_moe": Family(
        text(
            moe_intermediate_size=16,
            num_experts=4,
            num_experts_per_tok=2,
            num_shared_experts=1,
            sliding_window=WINDOW,
            layer_types=[SLIDING, FULL, SLIDING],
            is_moe_layer=[False, True, True],
        ),
        windows=(WINDOW, None, WINDOW),
    ),
    "gemma3n": Family(
        {
            "text_config": text(
                model_type="gemma3n_text",
                num_hidden_layers=6,
                num_kv_shared_layers=2,
                vocab_size_per_layer_input=40,
                sliding_window=WINDOW,
                rope_local_base_freq=1000.0,
                final_logit_softcapping=30.0,
                layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
                activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0, 0.0, 0.0],
                hidden_size_per_layer_input=8,
                altup_num_inputs=2,
                altup_coef_clip=120.0,
                altup_correct_scale=True,
                altup_active_idx=0,
                laurel_rank=4,
            )
        },
        attention="shared keys",
        windows=(WINDOW, WINDOW, None, WINDOW, WINDOW, None),
        calls=((0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 2)),
    ),
    "gemma4_text": Family(
        text(
            num_hidden_layers=6,
            num_kv_shared_layers=2,
            global_head_dim=16,
            vocab_size_per_layer_input=40,
            hidden_size_per_layer_input=8,
            sliding_window=WINDOW,
            layer_types=[SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL],
        ),
        attention="shared keys",
        windows=(WINDOW, WINDOW, None, WINDOW, WINDOW, None),
        calls=((0, 0), (1, 1), (2, 2), (3, 3), (4, 3), (5, 2)),
    ),
}
