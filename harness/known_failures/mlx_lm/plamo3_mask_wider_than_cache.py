"""A chunk of plamo3 sees one key more than its rotating caches hold: a decode answers otherwise than a prefill."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.plamo3 import Model, ModelArgs

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
window = {"sliding_window": 5, "window_size": 5, "sliding_window_pattern": 2}
mx.random.seed(0)
model = Model(ModelArgs.from_dict({"model_type": "plamo3", **sizes, **heads, **window}))
model.set_dtype(mx.float32)
tokens = mx.array([[1, 2, 3, 4, 5, 6]])
once = model(tokens, cache=make_prompt_cache(model))[:, -1]
cache = make_prompt_cache(model)
model(tokens[:, :5], cache=cache)
gap = float(mx.abs(once - model(tokens[:, 5:], cache=cache)[:, -1]).max())
if gap > 1e-4:
    raise SystemExit(f"the logits of the sixth token, decoded, are {gap:.3g} away from those of a prefill of six")
