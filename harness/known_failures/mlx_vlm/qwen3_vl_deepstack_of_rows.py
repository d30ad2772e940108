"""In a batch of two prompts with images BatchGenerator keeps the deepstack features of one alone."""

import mlx.core as mx
from mlx_vlm.generate.ar import PromptProcessingBatch, _merge_prefill_prompt_kwargs
from mlx_vlm.models.qwen3_vl import Model, ModelConfig, TextConfig, VisionConfig

text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-5}
text |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}
text |= {"max_position_embeddings": 64, "rope_scaling": {"type": "default", "mrope_section": [2, 1, 1]}}
vision = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": 32,
    "num_heads": 2,
    "in_channels": 2,
}
vision |= {"in_channels": 2, "patch_size": 2, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
special = {"image_token_id": 37, "video_token_id": 38, "vision_start_token_id": 39}
parts = TextConfig(model_type="qwen3_vl_text", **text), VisionConfig(**vision)
model = Model(ModelConfig(*parts, "qwen3_vl", **special))
ids, grid, seen = [[1, 39, 37, 37, 2], [4, 39, 37, 37, 5]], mx.array([[1, 2, 4]]), []
reads = [model.get_input_embeddings(mx.array([i]), mx.random.normal((8, 16)), image_grid_thw=grid) for i in ids]
given = [{name: value for name, value in read.to_dict().items() if value is not None} for read in reads]
for rows in ([0, 1], [0], [1]):
    embeddings, rest = _merge_prefill_prompt_kwargs([given[row] for row in rows], [ids[row] for row in rows])
    prompts = [ids[row] for row in rows], [1] * len(rows)
    batch = PromptProcessingBatch(model.language_model, rows, *prompts, embeddings, rest)
    batch.generate(lambda logits: seen.append(logits) or mx.argmax(logits, axis=-1), None)
gaps = [float(mx.abs(seen[0][row] - seen[1 + row][0]).max()) for row in (0, 1)]
if max(gaps) > 1e-4:
    raise SystemExit(f"logits of the two rows are {gaps[0]:.3g} and {gaps[1]:.3g} away from those of each alone")
