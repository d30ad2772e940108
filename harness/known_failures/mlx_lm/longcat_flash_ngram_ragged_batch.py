"""The shorter row of a ragged batch of longcat_flash_ngram goes on behind padding: its last token is forgotten."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.longcat_flash_ngram import Model, ModelArgs

sizes = {"hidden_size": 32, "ffn_hidden_size": 48, "num_layers": 1, "vocab_size": 40, "max_position_embeddings": 64}
latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
experts = {"moe_topk": 1, "expert_ffn_hidden_size": 16, "n_routed_experts": 2, "zero_expert_num": 0}
grams = {"ngram_vocab_size_ratio": 2, "emb_neighbor_num": 2, "emb_split_num": 2, "rope_theta": 1e4}
other = {"num_attention_heads": 4, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0}
scales = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True}
config = {"model_type": "longcat_flash_ngram", **sizes, **latent, **experts, **grams, **other, **scales}
model = Model(ModelArgs.from_dict(config))
batch = [rows[0].merge(list(rows)) for rows in zip(*(make_prompt_cache(model) for _ in range(2)), strict=True)]
for cache in batch:
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
model(mx.array([[7, 0, 0], [1, 2, 3]]), cache=batch)
for cache in batch:
    cache.finalize()
context = batch[0][0][0].tolist()  # the tokens that the n-grams of the next one begin with: it has been token 7 alone
if context != [7]:
    raise SystemExit(f"the row of the token 7 remembers {context}")
