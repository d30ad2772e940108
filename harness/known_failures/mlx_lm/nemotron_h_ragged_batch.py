"""The shorter row of a ragged batch loses its recurrent state: nemotron_h gives ssm_update a mask, but no lengths."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.nemotron_h import Model, ModelArgs

sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 8}
state = {"ssm_state_size": 8, "conv_kernel": 4, "n_groups": 1, "layer_norm_epsilon": 1e-5, "use_conv_bias": True}
no = dict.fromkeys(("attention_bias", "mamba_proj_bias", "mlp_bias", "use_bias"), False)
blocks = {"hybrid_override_pattern": ["M", "*"]}
model = Model(ModelArgs.from_dict({"model_type": "nemotron_h", **sizes, **heads, **state, **no, **blocks}))
alone = make_prompt_cache(model)
model(mx.array([[7]]), cache=alone)
batch = [rows[0].merge(list(rows)) for rows in zip(*(make_prompt_cache(model) for _ in range(2)), strict=True)]
for cache in batch:
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
model(mx.array([[7, 0, 0], [1, 2, 3]]), cache=batch)
for cache in batch:
    cache.finalize()
gap = float(mx.abs(alone[0][1] - batch[0][1][:1]).max())
if gap > 1e-5:
    raise SystemExit(f"the state of the row of one token is {gap:.3g} away from that of the same sequence by itself")
