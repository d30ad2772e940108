"""With kv_bits the caches of latent attention are quantised, and its next forward takes them for arrays."""

import mlx.core as mx
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.glm4_moe_lite import Model, ModelArgs

sizes = {"vocab_size": 8, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
feeds = {"intermediate_size": 32, "moe_intermediate_size": 32, "n_routed_experts": 2, "num_experts_per_tok": 1}
latent = {"kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32, "v_head_dim": 32}
model = Model(ModelArgs.from_dict(sizes | feeds | latent))
caches = make_prompt_cache(model)
mx.eval(model(mx.array([[1, 2]]), cache=caches))
try:
    maybe_quantize_kv_cache(caches, 0, 32, 8)
except NotImplementedError:  # refused before anything is changed, as rotating caches do
    raise SystemExit(0) from None
try:
    mx.eval(model(mx.array([[3]]), cache=caches))
except AttributeError as error:
    raise SystemExit(f"behind kv_bits=8 a decode raises: {error}") from None
