"""A row cannot leave a batch of nemotron-nas: the cache of a linear block never gets a key, and extract wants one."""

import importlib

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

nemotron_nas = importlib.import_module("mlx_lm.models.nemotron-nas")
linear = {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}
attending = {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}}
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "rms_norm_eps": 1e-5, "vocab_size": 40}
config = {"model_type": "nemotron-nas", **sizes, "block_configs": [attending, linear]}
model = nemotron_nas.Model(nemotron_nas.ModelArgs.from_dict(config))
batch = [rows[0].merge(list(rows)) for rows in zip(*(make_prompt_cache(model) for _ in range(2)), strict=True)]
model(mx.array([[1, 2], [3, 4]]), cache=batch)
try:
    [cache.extract(0) for cache in batch]  # what BatchGenerator does as a sequence ends
except TypeError as error:
    raise SystemExit(f"extract raised {error}") from error
