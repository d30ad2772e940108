"""What test_parity_vision draws: configurations of the three vision families, and prompts to read."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from reference_models import qwen2_vision, qwen2_vl, qwen3_vision, qwen3_vl, qwen3_vl_moe, rope

VOCAB, IMAGE, VIDEO, VISION_START = 40, 37, 38, 39
FAMILIES: dict[str, tuple[Any, str]] = {
    "qwen2_vl": (qwen2_vl, "Qwen2VL"),
    "qwen3_vl": (qwen3_vl, "Qwen3VL"),
    "qwen3_vl_moe": (qwen3_vl_moe, "Qwen3VLMoe"),
}
KINDS = (
    (),
    ("image",),
    ("image", "image"),
    ("video",),
    ("image", "video"),
    ("video", "image", "image"),
    ("video",) * 2,
)
Segment = tuple[str, tuple[int, int, int]]


@st.composite
def text_fields(draw: st.DrawFn, family: str) -> dict[str, Any]:
    interleaved = family != "qwen2_vl"
    head_dim = draw(st.sampled_from((8, 4, 12, 16)))
    pairs = head_dim // 2
    sections = [(pairs - h - w, h, w) for h in range(pairs) for w in range(pairs - h)]
    fitting = [(t, h, w) for t, h, w in sections if not interleaved or (3 * h - 2 < pairs and 3 * w - 1 < pairs)]
    kv_heads = draw(st.sampled_from((1, 2, 3)))
    heads = kv_heads * draw(st.sampled_from((1, 2, 4)))
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": draw(st.sampled_from((32, 20, 24))) if interleaved else heads * head_dim,
        "intermediate_size": draw(st.sampled_from((24, 40))),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_scaling": rope.MRopeScaling(draw(st.sampled_from(fitting)), mrope_interleaved=interleaved),
        "rope_theta": draw(st.sampled_from((100.0, 10000.0))),
        "tie_word_embeddings": draw(st.booleans()),
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
    }
    if interleaved:
        fields |= {"head_dim": head_dim, "attention_bias": draw(st.booleans())}
    if family == "qwen3_vl_moe":
        experts = draw(st.integers(1, 6))
        fields |= {
            "moe_intermediate_size": draw(st.sampled_from((16, 8))),
            "num_experts": experts,
            "num_experts_per_tok": draw(st.integers(1, experts)),
            "decoder_sparse_step": draw(st.integers(1, 2)),
            "mlp_only_layers": draw(st.sampled_from(((), (0,)))),
        }
    return fields


@st.composite
def configs(draw: st.DrawFn, family: str) -> Any:
    fields = draw(text_fields(family))
    depth, heads = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    # A LayerNorm over 4 numbers that happen to be nearly equal enlarges rounding: 8e-6 before it, 7e-5 behind it.
    width = max(heads * draw(st.sampled_from((8, 4, 12))), 8)
    tower = {
        "depth": depth,
        "num_heads": heads,
        "hidden_act": draw(st.sampled_from(("quick_gelu", "gelu_pytorch_tanh", "gelu"))),
        "in_channels": draw(st.sampled_from((3, 1))),
        "patch_size": draw(st.integers(1, 3)),
        "spatial_merge_size": draw(st.sampled_from((2, 1, 3))),
        "temporal_patch_size": draw(st.sampled_from((2, 1))),
    }
    vision: Any
    if family == "qwen2_vl":
        vision = qwen2_vision.VisionConfig(
            embed_dim=width, hidden_size=fields["hidden_size"], mlp_ratio=draw(st.integers(1, 3)), **tower
        )
    else:
        most = min(depth, fields["num_hidden_layers"])
        vision = qwen3_vision.VisionConfig(
            hidden_size=width,
            intermediate_size=draw(st.sampled_from((16, 28))),
            out_hidden_size=fields["hidden_size"],
            num_position_embeddings=draw(st.integers(1, 6)) ** 2,
            deepstack_visual_indexes=tuple(draw(st.permutations(range(depth)))[: draw(st.integers(0, most))]),
            **tower,
        )
    return FAMILIES[family][0].Config(vision=vision, **fields)


def segments(kind: str) -> st.SearchStrategy[Segment]:
    """Text of some tokens; an image or a video with its frames and its rows and columns of merge blocks."""
    blocks = st.integers(1, 3)
    if kind == "text":
        return st.tuples(st.just(kind), st.tuples(st.integers(1, 5), st.just(0), st.just(0)))
    return st.tuples(st.just(kind), st.tuples(st.integers(1, 5) if kind == "video" else st.just(1), blocks, blocks))


@st.composite
def layouts(draw: st.DrawFn) -> list[Segment]:
    """Text alone, one image, several images, videos, both; with or without text around each."""
    kinds = draw(st.sampled_from(KINDS))
    between = [draw(st.booleans()) or not kinds for _ in range(len(kinds) + 1)]
    names = [name for text, kind in zip(between, (*kinds, ""), strict=True) for name in ("text" * text, kind) if name]
    return [draw(segments(name)) for name in names]


def compose(layout: list[Segment], frames_apart: bool, rng: np.random.Generator) -> list[int]:
    """Token ids; text stands between runs of one kind, and before a video frame that is a run of its own."""
    tokens: list[int] = []
    for kind, (t, h, w) in layout:
        if kind == "text":
            tokens += rng.integers(0, IMAGE, t).tolist()
            continue
        token = IMAGE if kind == "image" else VIDEO
        frames = t if frames_apart else 1
        for _ in range(frames):
            if tokens and (tokens[-1] == token or rng.random() < 0.7):
                tokens += [*rng.integers(0, IMAGE, 2).tolist(), VISION_START]
            tokens += [token] * (t * h * w // frames)
    return tokens
