"""gpt_bigcode cannot read a batch: it counts positions from an offset that must be one number."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.gpt_bigcode import Model, ModelArgs

sizes = {"n_embd": 32, "n_layer": 2, "n_inner": 48, "n_head": 4, "n_positions": 64, "vocab_size": 40}
model = Model(ModelArgs.from_dict({"model_type": "gpt_bigcode", "layer_norm_epsilon": 1e-5, **sizes}))
rows = [make_prompt_cache(model), make_prompt_cache(model)]
for cache, tokens in zip(rows, ([7], [1, 2, 3]), strict=True):
    model(mx.array([tokens]), cache=cache)
batch = [pair[0].merge(list(pair)) for pair in zip(*rows, strict=True)]
try:
    model(mx.array([[8], [4]]), cache=batch)
except (TypeError, ValueError) as error:
    raise SystemExit(f"a forward of a batch raised {type(error).__name__}: {error}") from None
