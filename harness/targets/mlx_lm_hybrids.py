"""The families of mlx-lm some of whose layers keep a state: of a recurrence, a convolution, or an n-gram.

A state has no axis of keys. It cannot be trimmed at its front, nor can it go back; what can be judged of a sequence is
the attention of the layers that attend.
"""

from __future__ import annotations

from harness.targets.mlx_lm_family import LATENT, Family, text

WINDOW = 12

FAMILIES: dict[str, Family | tuple[Family, ...]] = {
    "nemotron_h": Family(
        text(
            attention_bias=False,
            mamba_num_heads=4,
            mamba_head_dim=8,
            mamba_proj_bias=False,
            ssm_state_size=8,
            conv_kernel=4,
            n_groups=1,
            mlp_bias=False,
            layer_norm_epsilon=1e-5,
            use_bias=False,
            use_conv_bias=True,
            hybrid_override_pattern=["M", "*", "-", "M", "*"],
        ),
        attention="grouped, with states",
        calls=((1, 0), (4, 1)),
    ),
    "jamba": Family(
        text(
            num_hidden_layers=4,
            attn_layer_offset=1,
            attn_layer_period=2,
            expert_layer_offset=1,
            expert_layer_period=2,
            mamba_d_conv=4,
            mamba_d_state=8,
            mamba_expand=2,
            num_experts=4,
            num_experts_per_tok=2,
        ),
        attention="grouped, with states",
    ),
    "qwen3_5": Family(
        {
            "text_config": text(
                model_type="qwen3_5_text",
                num_hidden_layers=4,
                linear_num_value_heads=4,
                linear_num_key_heads=2,
                linear_key_head_dim=8,
                linear_value_head_dim=8,
                linear_conv_kernel_dim=4,
                full_attention_interval=2,
                head_dim=16,
                rope_parameters={"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
            )
        },
        attention="grouped, with states",
        limits=("text alone: no image",),
    ),
    "qwen3_next": Family(
        text(
            num_hidden_layers=4,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            shared_expert_intermediate_size=16,
            mlp_only_layers=[],
            moe_intermediate_size=16,
            partial_rotary_factor=0.5,
            full_attention_interval=2,
            head_dim=16,
        ),
        attention="grouped, with states",
    ),
    "falcon_h1": Family(
        text(
            mamba_d_conv=4,
            mamba_d_head=8,
            mamba_d_ssm=32,
            mamba_d_state=8,
            mamba_n_heads=4,
            mamba_n_groups=1,
            key_multiplier=1.0,
            lm_head_multiplier=1.0,
        ),
        attention="grouped, with states",
    ),
    "granitemoehybrid": Family(
        text(
            num_hidden_layers=4,
            attention_bias=False,
            embedding_multiplier=1.0,
            attention_multiplier=0.35,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            layer_types=["mamba", "attention", "mamba", "attention"],
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=16,
            mamba_n_heads=4,
            mamba_d_head=16,
            mamba_proj_bias=False,
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_n_groups=1,
            mamba_conv_bias=True,
        ),
        attention="grouped, with states",
    ),
    "lfm2": Family(
        text(
            num_hidden_layers=4,
            norm_eps=1e-5,
            conv_bias=False,
            conv_L_cache=3,
            block_dim=32,
            block_multiple_of=8,
            block_ffn_dim_multiplier=1.0,
            block_auto_adjust_ff_dim=False,
            full_attn_idxs=[1, 3],
        ),
        attention="grouped, with states",
    ),
    "plamo2": Family(
        text(
            num_hidden_layers=4,
            hidden_size_per_head=8,
            attention_window_size=2048,
            full_attention_idx=[1, 3],
            mamba_d_state=8,
            mamba_d_conv=4,
            mamba_num_heads=4,
            mamba_step=2,
            mamba_chunk_size=8,
        ),
        attention="grouped, with states",
    ),
    "recurrent_gemma": Family(
        text(
            num_hidden_layers=4,
            attention_bias=False,
            conv1d_width=4,
            logits_soft_cap=30.0,
            attention_window_size=WINDOW,
            block_types=["recurrent", "attention"],
        ),
        attention="grouped, with states",
        windows=(WINDOW, WINDOW),
    ),
    "kimi_linear": Family(
        text(
            num_hidden_layers=4,
            linear_attn_config={
                "kda_layers": [1, 3],
                "full_attn_layers": [2, 4],
                "num_heads": 4,
                "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
            model_max_length=1024,
            num_experts=4,
            num_experts_per_token=2,
            num_shared_experts=1,
            moe_intermediate_size=16,
            first_k_dense_replace=1,
            **{name: size for name, size in LATENT.items() if name != "q_lora_rank"},
        ),
        attention="latent, with states",
    ),
    "longcat_flash_ngram": Family(
        text(
            num_layers=2,
            ffn_hidden_size=48,
            moe_topk=2,
            expert_ffn_hidden_size=16,
            n_routed_experts=4,
            zero_expert_num=2,
            routed_scaling_factor=1.0,
            mla_scale_q_lora=True,
            mla_scale_kv_lora=True,
            ngram_vocab_size_ratio=2,
            emb_neighbor_num=2,
            emb_split_num=2,
            **LATENT,
        ),
        attention="latent, with states",
        calls=((0, 0), (0, 1), (1, 2), (1, 3)),
    ),
}
