"""A batch whose rows all begin with padding cannot decode: qwen3_vl_moe cuts the mask to the longest row."""

import mlx.core as mx
from mlx_vlm.models.cache import make_prompt_cache
from mlx_vlm.models.qwen3_vl_moe import Model, ModelConfig, TextConfig, VisionConfig

text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-5}
text |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}
text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
text |= {"max_position_embeddings": 64, "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}}
parts = TextConfig(model_type="qwen3_vl_moe_text", mlp_only_layers=[], **text), VisionConfig(depth=1)
model = Model(ModelConfig(*parts, "qwen3_vl_moe")).language_model
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
