"""qwen2_vl rotates by its default base where the config names one as transformers 5 writes it, in rope_parameters."""

import mlx.core as mx
from mlx_lm.models.qwen2_vl import Model, ModelArgs

sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 48, "vocab_size": 40, "rms_norm_eps": 1e-5}
text = {"model_type": "text", "num_attention_heads": 4, "num_key_value_heads": 2, **sizes}
said = ({"rope_theta": 1e4}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}})
made = [Model(ModelArgs.from_dict({"model_type": "vision", "text_config": {**text, **base}})) for base in said]
made[1].update(made[0].parameters())
prompt = mx.array([[1, 2, 3, 4]])
gap = float(mx.abs(made[0](prompt) - made[1](prompt)).max())
if gap > 1e-4:
    base = made[1].language_model.args.rope_theta
    raise SystemExit(f"the config says 10000 twice; the second model rotates by {base}, its logits are {gap:.3g} away")
