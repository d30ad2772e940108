"""qwen3_vl_moe cannot read a prompt with an image and a video: it looks at the pixels of the image alone."""

import mlx.core as mx
from mlx_vlm.models.qwen3_vl_moe import Model, ModelConfig, TextConfig, VisionConfig

rope = {"type": "default", "mrope_section": [2, 1, 1]}
text = TextConfig("text", 2, 32, 48, 4, 4, 2, 1, [], 16, 1e-5, 40, 2, 8, 1e4, 64, rope_scaling=rope)
tower = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32, "num_heads": 2, "patch_size": 2}
vision = VisionConfig(**tower, deepstack_visual_indexes=[0, 1])
model = Model(ModelConfig(text, vision, "vl", image_token_id=37, video_token_id=38, vision_start_token_id=39))
ids, grid = mx.array([[39, 37, 39, 38, 1]]), mx.array([[1, 2, 2]])
image, video = mx.random.normal((4, 24)), mx.random.normal((4, 24))
try:
    model.get_input_embeddings(ids, image, pixel_values_videos=video, image_grid_thw=grid, video_grid_thw=grid)
except ValueError as error:
    raise SystemExit(f"ValueError: {error}") from None
