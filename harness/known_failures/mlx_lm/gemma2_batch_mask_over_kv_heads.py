"""gemma2 lays the masks of a batch over its KV heads: wrong where there are as many rows as heads, else an error."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gemma2 import Model, ModelArgs

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
mx.random.seed(0)
model = Model(ModelArgs.from_dict({"model_type": "gemma2", **sizes, **heads}))
alone = make_prompt_cache(model)
model(mx.array([[7]]), cache=alone)
right = model(mx.array([[8]]), cache=alone)
rows = [make_prompt_cache(model), make_prompt_cache(model)]
model(mx.array([[7]]), cache=rows[0])
batch = [pair[0].merge(list(pair)) for pair in zip(*rows, strict=True)]
wrong = model(mx.array([[8], [9]]), cache=batch)[:1]
gap = float(mx.abs(right - wrong).max())
if gap > 1e-4:
    raise SystemExit(
        f"the logits of a row in a batch of two are {gap:.3g} away from those of the same sequence by itself"
    )
