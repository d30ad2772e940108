"""In a ragged batch the queries of afm7's layers that share keys are rotated by the slot and not by the position."""

import mlx.core as mx
from mlx_lm.models.afm7 import Model, ModelArgs
from mlx_lm.models.cache import make_prompt_cache

sizes = {"vocab_size": 40, "hidden_dim": 32, "num_layers": 2, "num_kv_reuse_layers": 1}
mx.random.seed(0)
model = Model(ModelArgs.from_dict({"model_type": "afm7", **sizes, "num_heads": 4, "num_kv_heads": 2}))
alone, *rows = (make_prompt_cache(model) for _ in range(3))
for cache, tokens in ((alone, [7]), (rows[0], [7]), (rows[1], [1, 2, 3])):
    model(mx.array([tokens]), cache=cache)
batch = [pair[0].merge(list(pair)) for pair in zip(*rows, strict=True)]
gap = float(mx.abs(model(mx.array([[8]]), cache=alone) - model(mx.array([[8], [4]]), cache=batch)[:1]).max())
if gap > 1e-4:
    raise SystemExit(f"the logits of the shorter row are {gap:.3g} away from those of the same sequence by itself")
