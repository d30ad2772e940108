"""qwen3_vl_moe cannot read a prompt with an image and a video: it looks at the pixels of the image alone."""

import mlx.core as mx
from mlx_vlm.models.qwen3_vl_moe import Model, ModelConfig, TextConfig, VisionConfig

text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 40, "rms_norm_eps": 1e-5}
text |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}
text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
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
parts = (
    TextConfig(model_type="qwen3_vl_moe_text", mlp_only_layers=[], **text),
    VisionConfig(**vision),
)
model = Model(ModelConfig(*parts, "qwen3_vl_moe", **special))
ids, grid = mx.array([[39, 37, 39, 38, 1]]), mx.array([[1, 2, 2]])
video = {"pixel_values_videos": mx.random.normal((4, 16)), "image_grid_thw": grid, "video_grid_thw": grid}
try:
    model.get_input_embeddings(ids, mx.random.normal((4, 16)), **video)
except ValueError as error:
    raise SystemExit(f"ValueError: {error}") from None
