"""The shorter row of a ragged batch of olmo_hybrid is wrong: its convolutions keep padding in the place of tokens."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.olmo_hybrid import Model, ModelArgs

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 40, "rms_norm_eps": 1e-5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_bias": False}
linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
other = {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "tie_word_embeddings": False}
kinds = {"layer_types": ["linear_attention"]}
mx.random.seed(0)
model = Model(ModelArgs.from_dict({"model_type": "olmo_hybrid", **sizes, **heads, **linear, **other, **kinds}))
alone = make_prompt_cache(model)
model(mx.array([[7]]), cache=alone)
batch = [rows[0].merge(list(rows)) for rows in zip(*(make_prompt_cache(model) for _ in range(2)), strict=True)]
for cache in batch:
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
model(mx.array([[7, 0, 0], [1, 2, 3]]), cache=batch)
for cache in batch:
    cache.finalize()
gap = float(mx.abs(alone[0][0] - batch[0][0][:1]).max())
if gap > 1e-5:
    raise SystemExit(f"what the first convolution keeps of the shorter row is {gap:.3g} away from that of it alone")
