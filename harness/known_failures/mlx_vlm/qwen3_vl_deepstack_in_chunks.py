"""Later chunks of an image get the deepstack features of its first tokens, where BatchGenerator reads prompts."""

import mlx.core as mx
from mlx_vlm.generate.ar import PromptProcessingBatch
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
ids, grid = [1, 39, 37, 37, 37, 37, 37, 37, 2, 3], mx.array([[1, 4, 6]])
read = model.get_input_embeddings(mx.array([ids]), mx.random.normal((24, 16)), image_grid_thw=grid).to_dict()
given, seen = {name: value for name, value in read.items() if value is not None}, []
for step in (64, 4):
    rest = {name: value for name, value in given.items() if name != "inputs_embeds"}
    batch = PromptProcessingBatch(model.language_model, [0], [ids], [1], given["inputs_embeds"], rest)
    batch.prefill_step_size = step
    while batch.needs_processing():
        batch.prompt_step()
    batch.generate(lambda logits: seen.append(logits) or mx.argmax(logits, axis=-1), None)
if (gap := float(mx.abs(seen[0] - seen[1]).max())) > 1e-4:
    raise SystemExit(f"read in chunks of 4 tokens, the same prompt ends with logits {gap:.3g} away")
