"""BatchGenerator with max_kv_size loses the first keys: other probabilities than where one request runs by itself."""

import importlib

import mlx.core as mx
from mlx_lm.models import qwen3

generate = importlib.import_module("mlx_lm.generate")
sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 8, "vocab_size": 40}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
rope = {"max_position_embeddings": 512, "rope_theta": 10000.0}
mx.random.seed(0)
model = qwen3.Model(qwen3.ModelArgs.from_dict({"model_type": "qwen3", **sizes, **heads, **rope}))
alone = list(generate.generate_step(mx.array([1, 2]), model, max_tokens=16, max_kv_size=8))
generator = generate.BatchGenerator(model, max_tokens=16, max_kv_size=8)
generator.insert([[1, 2]])
together: list[tuple[int, mx.array]] = []
while len(together) < 16:
    together += [(response.token, response.logprobs) for response in generator.next()[1]]
gaps = [float(mx.abs(a[1] - b[1]).max()) for a, b in zip(alone, together, strict=True)]
if max(gaps) > 1e-3:
    at = next(i for i, gap in enumerate(gaps) if gap > 1e-3)
    raise SystemExit(f"token {at} behind a prompt of 2: log probabilities differ by {gaps[at]:.2g}; max_kv_size is 8")
