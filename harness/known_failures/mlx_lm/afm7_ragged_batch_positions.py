"""In a ragged batch the queries of afm7's layers that share keys are rotated by the slot and not by the position."""

import mlx.core as mx
from mlx_lm.models.afm7 import Model, ModelArgs
from mlx_lm.models.cache import make_prompt_cache

sizes = {
    "vocab_size": 40,
    "hidden_dim": 32,
    "num_layers": 2,
    "num_kv_reuse_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
}
mx.random.seed(0)
model = Model(ModelArgs.from_dict({"model_type": "afm7", **sizes}))
alone = make_prompt_cache(model)
model(mx.array([[7]]), cache=alone)
right = model(mx.array([[8]]), cache=alone)
rows = [make_prompt_cache(model), make_prompt_cache(model)]
model(mx.array([[7]]), cache=rows[0])
model(mx.array([[1, 2, 3]]), cache=rows[1])
batch = [pair[0].merge(list(pair)) for pair in zip(*rows, strict=True)]
wrong = model(mx.array([[8], [4]]), cache=batch)[:1]
gap = float(mx.abs(right - wrong).max())
if gap > 1e-4:
    raise SystemExit(f"the logits of the shorter row are {gap:.3g} away from those of the same sequence by itself")
