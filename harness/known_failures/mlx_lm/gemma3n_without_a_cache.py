"""Without a cache gemma3n is another model: its layers that share keys make their own."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gemma3n import Model, ModelArgs

sizes = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 48, "vocab_size": 40, "rms_norm_eps": 1e-5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_kv_shared_layers": 2}
rope = {"max_position_embeddings": 64, "rope_local_base_freq": 1e4, "rope_theta": 1e6, "sliding_window": 16}
altup = {"altup_num_inputs": 2, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0}
extra = {"vocab_size_per_layer_input": 40, "hidden_size_per_layer_input": 8, "laurel_rank": 4}
layers = {"layer_types": ["sliding_attention", "full_attention"] * 2, "activation_sparsity_pattern": [0.0] * 4}
text = {"model_type": "gemma3n", **sizes, **heads, **rope, **altup, **extra, **layers, "final_logit_softcapping": 30.0}
mx.random.seed(0)
model = Model(ModelArgs.from_dict({"model_type": "gemma3n", "text_config": text}))
tokens = mx.array([[1, 2, 3]])
gap = float(mx.abs(model(tokens) - model(tokens, cache=make_prompt_cache(model))).max())
if gap > 1e-4:
    raise SystemExit(f"the logits of three tokens without a cache are {gap:.3g} away from those with an empty one")
