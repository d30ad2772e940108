"""The shorter row of a ragged batch of recurrent_gemma is wrong: its recurrent blocks read the padding as tokens."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.recurrent_gemma import Model, ModelArgs

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False, "attention_window_size": 8}
other = {"conv1d_width": 4, "logits_soft_cap": 30.0, "rope_theta": 1e4, "block_types": ["recurrent", "attention"]}
model = Model(ModelArgs.from_dict({"model_type": "recurrent_gemma", **sizes, **heads, **other}))
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
    raise SystemExit(f"the state of the row of one token is {gap:.3g} away from that of the same sequence by itself")
