"""Qwen2-VL: a Qwen2 decoder whose RoPE is M-RoPE with chunked sections, and a vision tower (``qwen2_vision``).

Sources: Qwen2-VL (arXiv 2409.12191) and the published config and code of ``Qwen/Qwen2-VL-7B-Instruct``.
Parameter names are those of the checkpoint. The queries, keys and values have a bias, the output projection
has none.

A text token has the same T, H and W position: ``offset``, shifted by what images before it saved.

Sliding windows (``use_sliding_window``, off in every published checkpoint) follow transformers 5: ``layer_types`` says
which layers have one, or else every layer from ``max_window_layers`` on; a window counts the query's own key.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from reference_models import layers, qwen2_vision, rope
from reference_models.mrope_decoder import MRopeDecoder

LayerType = Literal["full_attention", "sliding_attention"]


@dataclass(frozen=True)
class Config:
    """Fields of the published config.json: the text part, then ``vision_config`` (None: text alone) and the ids of the
    tokens that stand for its features. ValueError when they do not fit together.

    ``sliding_window`` (tokens) and ``max_window_layers`` say nothing while ``use_sliding_window`` is off.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rope_scaling: rope.MRopeScaling
    rope_theta: float = 1000000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    max_window_layers: int | None = None
    layer_types: tuple[LayerType, ...] | None = None
    vision: qwen2_vision.VisionConfig | None = None
    image_token_id: int = 151655
    video_token_id: int = 151656

    def __post_init__(self) -> None:
        layers.check_divisors(rope_theta=self.rope_theta, rms_norm_eps=self.rms_norm_eps)
        layers.check_positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
        )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be a multiple of num_attention_heads "
                f"({self.num_attention_heads})"
            )
        layers.check_heads(self.num_attention_heads, self.num_key_value_heads, self.head_dim)
        self.rope_scaling.check(self.head_dim)
        if self.rope_scaling.mrope_interleaved:
            raise ValueError("qwen2_vl has chunked M-RoPE sections; mrope_interleaved belongs to qwen3_vl")
        self._check_windows()
        if self.vision is not None:
            qwen2_vision.check_join(self.vision, self)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of every layer: how many keys a token sees, its own included; None for all."""
        if not self.use_sliding_window:
            return (None,) * self.num_hidden_layers
        types = self.layer_types or self._types_by_depth()
        return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in types)

    def _types_by_depth(self) -> tuple[LayerType, ...]:
        full, sliding = get_args(LayerType)
        first = self.max_window_layers or 0
        return tuple(sliding if index >= first else full for index in range(self.num_hidden_layers))

    def _check_windows(self) -> None:
        kinds, count, first = self.layer_types, self.num_hidden_layers, self.max_window_layers
        known = get_args(LayerType)
        if kinds is not None and (len(kinds) != count or set(kinds) - set(known)):
            raise ValueError(f"layer_types must name one of {', '.join(known)} for each of {count} layers")
        if not self.use_sliding_window:
            if kinds is not None and "sliding_attention" in kinds:
                raise ValueError("layer_types names sliding_attention, but use_sliding_window is false")
            return
        if self.sliding_window is None:
            raise ValueError("use_sliding_window is true, but sliding_window is missing")
        layers.check_positive(sliding_window=self.sliding_window)
        if first is not None and first < 0:
            raise ValueError(f"max_window_layers must be at least 0, not {first}")
        if kinds is None and first is None:
            raise ValueError("use_sliding_window is true, but neither layer_types nor max_window_layers says where")
        # A depth that no layer reaches is what writers leave there by default, and says nothing against the types.
        if kinds is not None and first is not None and first < count and kinds != self._types_by_depth():
            raise ValueError(f"layer_types and max_window_layers ({first}) disagree about which layers have a window")


def attention(config: Config) -> layers.GroupedAttention:
    """The attention of any layer."""
    return layers.GroupedAttention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        qkv_bias=True,
    )


class Model(MRopeDecoder):
    """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``; ``read`` looks at images."""

    def __init__(self, config: Config):
        hidden, eps = config.hidden_size, config.rms_norm_eps
        super().__init__(
            config,
            [
                layers.Block(hidden, eps, attention(config), layers.SwiGLU(hidden, config.intermediate_size))
                for _ in range(config.num_hidden_layers)
            ],
            qwen2_vision.Tower(config.vision) if config.vision else None,
            config.windows,
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
        "rope_scaling": rope.MRopeScaling((2, 1, 1)),
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
    "wide-heads": _tiny(num_attention_heads=2, num_key_value_heads=1, rope_scaling=rope.MRopeScaling((2, 3, 3))),
    "windowed": _tiny(use_sliding_window=True, sliding_window=4, max_window_layers=0),
    "full-then-windowed": _tiny(
        num_hidden_layers=3,
        num_key_value_heads=1,
        use_sliding_window=True,
        sliding_window=3,
        layer_types=("full_attention", "sliding_attention", "sliding_attention"),
    ),
    "vision": _tiny(vision=qwen2_vision.tiny()),
    "vision-wide-heads": _tiny(
        num_attention_heads=2,
        num_key_value_heads=1,
        num_hidden_layers=3,
        tie_word_embeddings=True,
        rope_scaling=rope.MRopeScaling((2, 3, 3)),
        vision=qwen2_vision.tiny(depth=4, num_heads=4, mlp_ratio=4, patch_size=2),
    ),
    "vision-head-of-32": _tiny(
        num_attention_heads=1,
        num_key_value_heads=1,
        rope_scaling=rope.MRopeScaling((4, 6, 6)),
        vision=qwen2_vision.tiny(),
    ),
}
