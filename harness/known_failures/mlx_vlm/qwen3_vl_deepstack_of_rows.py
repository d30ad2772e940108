"""In a batch of two prompts with images BatchGenerator keeps the deepstack features of one alone."""

import mlx.core as mx
from mlx_vlm.generate.ar import PromptProcessingBatch, _merge_prefill_prompt_kwargs
from mlx_vlm.models.qwen3_vl import Model, ModelConfig, TextConfig, VisionConfig

rope = {"type": "default", "mrope_section": [2, 1, 1]}
text = TextConfig("text", 2, 32, 48, 4, 1e-5, 40, 2, 8, 1e4, 64, rope_scaling=rope)
tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_heads": 2, "patch_size": 2}
vision = VisionConfig(**tower, deepstack_visual_indexes=[0, 1])
model = Model(ModelConfig(text, vision, "vl", image_token_id=37, video_token_id=38, vision_start_token_id=39))
ids, grid = [[1, 39, 37, 37, 2], [4, 39, 37, 37, 5]], mx.array([[1, 2, 4]])
seen: dict[int, mx.array] = {}
reads = [model.get_input_embeddings(mx.array([i]), mx.random.normal((8, 24)), image_grid_thw=grid) for i in ids]
given = [{name: value for name, value in read.to_dict().items() if value is not None} for read in reads]
for rows in ([0, 1], [0], [1]):
    prompts = [ids[row] for row in rows]
    embeddings, rest = _merge_prefill_prompt_kwargs([given[row] for row in rows], prompts)
    batch = PromptProcessingBatch(model.language_model, rows, prompts, [1] * len(rows), embeddings, rest)
    batch.generate(lambda logits: mx.argmax(seen.setdefault(len(seen), logits), axis=-1), None)
gaps = [float(mx.abs(seen[0][row] - seen[1 + row][0]).max()) for row in (0, 1)]
if max(gaps) > 1e-4:
    raise SystemExit(f"logits of the two rows are {gaps[0]:.3g} and {gaps[1]:.3g} away from those of each alone")
