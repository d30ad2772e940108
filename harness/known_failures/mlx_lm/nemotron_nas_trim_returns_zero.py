"""trim_prompt_cache says that it trimmed nothing, and has trimmed: it tells what the first cache says alone."""

import importlib

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache, trim_prompt_cache

nemotron_nas = importlib.import_module("mlx_lm.models.nemotron-nas")
linear = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}
attending = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 40}
config = {"model_type": "nemotron-nas", **sizes, "block_configs": [linear, attending]}
model = nemotron_nas.Model(nemotron_nas.ModelArgs.from_dict(config))
cache = make_prompt_cache(model)
model(mx.array([[1, 2, 3, 4]]), cache=cache)
told, offsets = trim_prompt_cache(cache, 2), [layer.offset for layer in cache]
if told != 2:
    raise SystemExit(f"trim_prompt_cache(cache, 2) behind four tokens returned {told}; the offsets are {offsets}")
