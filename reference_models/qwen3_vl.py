"""Qwen3-VL: a Qwen3 decoder (RMS norm on each head of q and k) with interleaved M-RoPE, and a vision tower
(``qwen3_vision``).

Sources: Qwen3-VL (arXiv 2511.21631) and the published config and code of ``Qwen/Qwen3-VL-4B-Instruct``.
Parameter names are those of the checkpoint. ``head_dim`` is a field of its own and need not be
``hidden_size / heads``.

A text token has the same T, H and W position: ``offset``, shifted by what images before it saved. DeepStack adds image
features to the output of early layers; text has none.
"""

from dataclasses import dataclass

from mlx import nn

from reference_models import layers, qwen3_vision, rope
from reference_models.mrope_decoder import MRopeDecoder, qwen3_attention


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json: the text part, then ``vision_config`` (None: text alone) and the ids of the
    tokens that stand for its features. ValueError when they do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope_scaling: rope.MRopeScaling
    rope_theta: float = 5000000.0
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False
    vision: qwen3_vision.VisionConfig | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656

    def __post_init__(self) -> None:
        layers.check_divisors(rope_theta=self.rope_theta, rms_norm_eps=self.rms_norm_eps)
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
        )
        layers.check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        self.rope_scaling.check(self.head_dim)
        if not self.rope_scaling.mrope_interleaved:
            raise ValueError("qwen3_vl has interleaved M-RoPE sections: set mrope_interleaved")
        if self.vision is not None:
            qwen3_vision.check_join(self.vision, self)


def feed_forward(config: Config, index: int) -> nn.Module:
    """The feed-forward of layer ``index``: always dense here."""
    return layers.SwiGLU(config.hidden_size, config.intermediate_size)


class Model(MRopeDecoder):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``; ``read`` looks at images."""

    def __init__(self, config: Config):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            config,
            [
                layers.Block(hidden, eps, qwen3_attention(config), feed_forward(config, index))
                for index in range(config.num_hidden_layers)
            ],
            qwen3_vision.Tower(config.vision) if config.vision else None,
        )


def _tiny(**changes: object) -> Config:
    """The simplest tiny configuration, changed."""
    fields: dict[str, object] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_scaling": rope.MRopeScaling((2, 1, 1), mrope_interleaved=True),
        "rope_theta": 100.0,
        "image_token_id": 61,
        "video_token_id": 62,
    }
    return Config(**(fields | changes))  # type: ignore[arg-type]


TINY: dict[str, Config] = {
    "one-layer": _tiny(num_hidden_layers=1),
    "plain": _tiny(),
    "one-kv-head": _tiny(num_key_value_heads=1, tie_word_embeddings=True),
    "all-kv-heads": _tiny(num_key_value_heads=4, num_hidden_layers=3),
    "wide-heads": _tiny(
        head_dim=16, attention_bias=True, rope_scaling=rope.MRopeScaling((4, 2, 2), mrope_interleaved=True)
    ),
    "vision": _tiny(vision=qwen3_vision.tiny()),
    "vision-deep": _tiny(
        num_hidden_layers=3,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        head_dim=16,
        rope_scaling=rope.MRopeScaling((4, 2, 2), mrope_interleaved=True),
        vision=qwen3_vision.tiny(depth=4, num_heads=4, patch_size=2, deepstack_visual_indexes=(0, 1, 3)),
    ),
    "vision-heads-of-32": _tiny(
        head_dim=32, rope_scaling=rope.MRopeScaling((6, 5, 5), mrope_interleaved=True), vision=qwen3_vision.tiny()
    ),
}
