"""A batch whose rows all begin with padding cannot decode: qwen3_vl_moe cuts the mask to the longest row."""

import mlx.core as mx
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.qwen3_vl_moe import Model, ModelConfig, TextConfig, VisionConfig

rope = {"type": "default", "mrope_section": [2, 1, 1]}
text = TextConfig("text", 2, 32, 48, 4, 4, 2, 1, [], 16, 1e-5, 40, 2, 8, 1e4, 64, rope_scaling=rope)
model = Model(ModelConfig(text, VisionConfig(depth=1), "vl")).language_model
deltas, alone = mx.zeros((2, 1), mx.int32), [make_prompt_cache(model) for _ in range(2)]
model(mx.array([[1, 2, 3]]), cache=alone[0])  # the cached beginning of one prompt; the other has none
batch = [rows[0].merge(list(rows)) for rows in zip(*alone, strict=True)]
for cache in batch:
    cache.prepare(lengths=[1, 4], right_padding=[3, 0])
model(mx.array([[4, 0, 0, 0], [5, 6, 7, 8]]), cache=batch, rope_deltas=deltas)
for cache in batch:
    cache.finalize()
try:
    mx.eval(model(mx.array([[9], [9]]), cache=batch, rope_deltas=deltas).logits)
except ValueError as error:
    raise SystemExit(f"ValueError: {' '.join(str(error).split())}") from None
