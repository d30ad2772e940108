"""Speculative generation that fills the window of a rotating cache keeps rejected drafts: other tokens than without."""

import mlx.core as mx
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models import gemma3_text

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "head_dim": 8, "vocab_size": 40}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8.0}
windows = {"sliding_window": 8, "sliding_window_pattern": 2}
models = []
for seed in (0, 1):
    mx.random.seed(seed)
    arguments = gemma3_text.ModelArgs.from_dict({"model_type": "gemma3_text", **sizes, **heads, **windows})
    models.append(gemma3_text.Model(arguments))
    models[-1].update({"model": {"embed_tokens": {"weight": mx.random.normal((40, 32))}}})
prompt = mx.array([1, 2, 3, 4])
plain = [int(token) for token, _ in generate_step(prompt, models[0], max_tokens=16)]
drafted = [int(token) for token, *_ in speculative_generate_step(prompt, *models, num_draft_tokens=3, max_tokens=16)]
if drafted != plain:
    at = next(i for i, (a, b) in enumerate(zip(drafted, plain, strict=True)) if a != b)
    raise SystemExit(f"with drafts, token {at} behind a prompt of 4 is {drafted[at]}, not {plain[at]}; the window is 8")
