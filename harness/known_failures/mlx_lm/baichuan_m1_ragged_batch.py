"""The shorter row of a ragged batch of baichuan_m1 is wrong: its convolutions keep the padding as the last token."""

import mlx.core as mx
from mlx_lm.models.baichuan_m1 import Model, ModelArgs
from mlx_lm.models.cache import make_prompt_cache

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_theta": 1e4, "conv_window": 2}
window = {"sliding_window": 16, "sliding_window_layers": [0]}
mx.random.seed(0)
model = Model(ModelArgs.from_dict({"model_type": "baichuan_m1", **sizes, **heads, **window}))
alone = make_prompt_cache(model)
model(mx.array([[7]]), cache=alone)
batch = [rows[0].merge(list(rows)) for rows in zip(*(make_prompt_cache(model) for _ in range(2)), strict=True)]
for cache in batch:
    cache.prepare(lengths=[1, 3], right_padding=[2, 0])
model(mx.array([[7, 0, 0], [1, 2, 3]]), cache=batch)
for cache in batch:
    cache.finalize()
gap = float(mx.abs(alone[0][0][0] - batch[0][0][0][:1]).max())
if gap > 1e-5:
    raise SystemExit(f"the key before the next one is {gap:.3g} away from that of the same sequence by itself")
