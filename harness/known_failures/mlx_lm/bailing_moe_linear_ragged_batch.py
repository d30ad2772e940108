"""The shorter row of a ragged batch of bailing_moe_linear: its linear attention takes padding for tokens."""

import mlx.core as mx
from mlx_lm.models.bailing_moe_linear import Model, ModelArgs
from mlx_lm.models.cache import make_prompt_cache

sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "head_dim": 8, "vocab_size": 40}
layers = {"num_hidden_layers": 2, "layer_group_size": 2, "first_k_dense_replace": 2, "group_norm_size": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "rms_norm_eps": 1e-5, "rope_theta": 1e4}
experts = {"num_experts": 2, "num_shared_experts": 1, "num_experts_per_tok": 1, "norm_topk_prob": True, "topk_group": 1}
config = {"model_type": "bailing_moe_linear", "max_position_embeddings": 64, **sizes, **layers, **heads, **experts}
mx.random.seed(0)
model = Model(ModelArgs.from_dict(config))
alone, *rows = (make_prompt_cache(model) for _ in range(3))
batch = [pair[0].merge(list(pair)) for pair in zip(*rows, strict=True)]
for cache in batch:
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
model(mx.array([[7, 0, 0], [1, 2, 3]]), cache=batch)
for cache in batch:
    cache.finalize()
model(mx.array([[7]]), cache=alone)
gap = float(mx.abs(model(mx.array([[8]]), cache=alone) - model(mx.array([[8], [4]]), cache=batch)[:1]).max())
if gap > 1e-4:
    raise SystemExit(f"the logits of the shorter row are {gap:.3g} away from those of the same sequence by itself")
