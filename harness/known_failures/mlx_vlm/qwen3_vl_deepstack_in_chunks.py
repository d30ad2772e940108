"""Later chunks of an image get the deepstack features of its first tokens, where BatchGenerator reads prompts."""

import mlx.core as mx
from mlx_vlm.generate.ar import PromptProcessingBatch
from mlx_vlm.models.qwen3_vl import Model, ModelConfig, TextConfig, VisionConfig

rope = {"type": "default", "mrope_section": [2, 1, 1]}
text = TextConfig("text", 2, 32, 48, 4, 1e-5, 40, 2, 8, 1e4, 64, rope_scaling=rope)
tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_heads": 2, "patch_size": 2}
vision = VisionConfig(**tower, deepstack_visual_indexes=[0, 1])
model = Model(ModelConfig(text, vision, "vl", image_token_id=37, video_token_id=38, vision_start_token_id=39))
ids, grid = [1, 39, 37, 37, 37, 37, 37, 37, 2, 3], mx.array([[1, 4, 6]])
read = model.get_input_embeddings(mx.array([ids]), mx.random.normal((24, 24)), image_grid_thw=grid).to_dict()
embeddings = read.pop("inputs_embeds")
seen: dict[int, mx.array] = {}
given = {name: value for name, value in read.items() if value is not None}
for step in (64, 4):
    batch = PromptProcessingBatch(model.language_model, [0], [ids], [1], embeddings, dict(given))
    batch.prefill_step_size = step
    while batch.needs_processing():
        batch.prompt_step()
    batch.generate(lambda logits: mx.argmax(seen.setdefault(len(seen), logits), axis=-1), None)
if (gap := float(mx.abs(seen[0] - seen[1]).max())) > 1e-4:
    raise SystemExit(f"read in chunks of 4 tokens, the same prompt ends with logits {gap:.3g} away")
