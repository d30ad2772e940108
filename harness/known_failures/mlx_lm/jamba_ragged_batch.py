"""The shorter row of a ragged batch of jamba is wrong: its Mamba layers read the padding like any other token."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.jamba import Model, ModelArgs

sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
layers = {
    f"{kind}_layer_{what}": 1 + (what == "period") for kind in ("attn", "expert") for what in ("offset", "period")
}
mamba = {"mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2, "num_experts": 2, "num_experts_per_tok": 1}
model = Model(ModelArgs.from_dict({"model_type": "jamba", **sizes, **heads, **layers, **mamba}))
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
