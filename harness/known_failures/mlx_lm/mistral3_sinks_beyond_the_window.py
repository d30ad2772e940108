"""With max_kv_size below the window, mistral3 decodes over the first tokens, which its window has left behind."""

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mistral3 import Model, ModelArgs

sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "vocab_size": 40, "rms_norm_eps": 1e-5}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
rotation = {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
window = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "rope_parameters": rotation}
text = {"model_type": "ministral3", **sizes, **heads, **window}
model = Model(ModelArgs.from_dict({"model_type": "mistral3", "text_config": text}))
model.layers[1].self_attn.o_proj.weight *= 0  # the layer with a window alone
last: dict[int | None, list[mx.array]] = {None: [], 6: []}
for bound, seen in last.items():
    for first in (1, 2):  # nothing else differs, and the ninth token sees eight
        cache = make_prompt_cache(model, max_kv_size=bound)
        for token in (first, 3, 4, 5, 6, 7, 8, 9, 10):
            logits = model(mx.array([[token]]), cache=cache)
        seen.append(logits)
whole, bounded = (float(mx.abs(seen[0] - seen[1]).max()) for seen in last.values())
if bounded > 1e-5 >= whole:
    raise SystemExit(f"the first token changes logits outside its window by {bounded:.2g}, unbounded by {whole:.2g}")
