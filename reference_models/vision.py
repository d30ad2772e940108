"""What the vision towers of the Qwen families share: grids, patches, 2-D rotary, attention within a frame.

An image or a video comes as the published processors make it: ``grid (t, h, w)`` counts patches, and patch ``n``
is one row of ``channels * temporal_patch_size * patch_size ** 2`` pixels, in that order of axes. Frames follow each
other; within a frame the patches of one merge block (``merge x merge`` neighbours, which end as one token) are
neighbours in the list.

Sources: Qwen2-VL (arXiv 2409.12191), Qwen3-VL (arXiv 2511.21631), and the published processors and models of
``Qwen/Qwen2-VL-7B-Instruct`` and ``Qwen/Qwen3-VL-4B-Instruct``. Parameter names are those of the checkpoints.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx import nn

from reference_models import layers, rope

Grid = tuple[int, int, int]
"""Patches along time, height and width."""

NORM_EPS = 1e-6  # of every norm in the towers; no field of the configs sets it
ROPE_THETA = 10000.0  # likewise
ACTIVATIONS: dict[str, Callable[[mx.array], mx.array]] = {
    "gelu": nn.gelu,
    "gelu_pytorch_tanh": nn.gelu_approx,
    "quick_gelu": nn.gelu_fast_approx,
    "silu": nn.silu,
}
"""``hidden_act`` of the configs."""


@dataclass(frozen=True, eq=False)
class Features:
    """What a tower makes of some images: ``merged [N, hidden]``, one row per token, and DeepStack's rows likewise."""

    merged: mx.array
    deepstack: tuple[mx.array, ...] = ()


def as_grids(grid_thw: mx.array | Sequence[Sequence[int]], merge: int) -> tuple[Grid, ...]:
    """``[n, 3]`` as Python numbers. ValueError unless each is positive and its frames split into merge blocks."""
    rows: Any = grid_thw.tolist() if hasattr(grid_thw, "tolist") else grid_thw  # an array of any library
    if not isinstance(rows, Sequence) or any(not isinstance(row, Sequence) or len(row) != 3 for row in rows):
        raise ValueError("grid_thw must be [n, 3]: patches along time, height and width of each image or video")
    grids = tuple((int(t), int(h), int(w)) for t, h, w in rows)
    for grid in grids:
        if min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            raise ValueError(f"grid {grid} must be positive, its height and width multiples of {merge}")
    return grids


def check_pixels(pixel_values: mx.array, grids: Sequence[Grid], columns: int) -> None:
    """Raise ValueError unless ``pixel_values`` is ``[patches of grids, columns]``."""
    patches = sum(math.prod(grid) for grid in grids)
    if tuple(pixel_values.shape) != (patches, columns):
        raise ValueError(
            f"pixel_values must be [{patches}, {columns}] for the grids {list(grids)}, not {list(pixel_values.shape)}"
        )


def check_tower(width: int, heads: int, hidden_act: str, **sizes: int) -> None:
    """Raise ValueError unless all sizes are positive, a head splits into H and W pairs and the activation is known."""
    layers.check_positive(num_heads=heads, **sizes)
    if width < 1 or width % (4 * heads):
        raise ValueError(
            f"the vision width ({width}) must be a multiple of 4 * num_heads ({heads}): half of the pairs "
            "of a head turn by the row, half by the column"
        )
    if hidden_act not in ACTIVATIONS:
        raise ValueError(f"hidden_act {hidden_act!r} is not one of {', '.join(ACTIVATIONS)}")


def check_join(field: str, width: int, text: Any) -> None:
    """Raise ValueError unless features of ``width``, which ``field`` names, fit the text's config: its hidden_size, and
    two different tokens of its vocabulary that stand for them."""
    if width != text.hidden_size:
        raise ValueError(f"vision {field} ({width}) must be the hidden_size of the text ({text.hidden_size})")
    for name in ("image_token_id", "video_token_id"):
        if not 0 <= getattr(text, name) < text.vocab_size:
            raise ValueError(f"{name} ({getattr(text, name)}) must lie in 0..vocab_size - 1 ({text.vocab_size - 1})")
    if text.image_token_id == text.video_token_id:
        raise ValueError(f"image_token_id and video_token_id are both {text.image_token_id}")


def patch_coordinates(grid: Grid, merge: int) -> list[tuple[int, int]]:
    """Row and column of every patch of one frame, in the order of the list: merge block after merge block."""
    _, height, width = grid
    return [
        (row, column)
        for top in range(0, height, merge)
        for left in range(0, width, merge)
        for row in range(top, top + merge)
        for column in range(left, left + merge)
    ]


def rotary_angles(grids: Sequence[Grid], merge: int, head_dim: int) -> tuple[mx.array, mx.array]:
    """Cosine and sine, float32 ``[1, patches, head_dim / 2]``: the first half of the pairs turn by the row, the other
    half by the column, both halves through the same frequencies. Time plays no part."""
    coordinates = mx.array(
        [place for grid in grids for place in patch_coordinates(grid, merge) * grid[0]], dtype=mx.float32
    )
    inv_freq = 1 / rope.standard_freqs(head_dim // 2, ROPE_THETA)
    angles = (coordinates[:, :, None] * inv_freq).reshape(1, -1, head_dim // 2)
    return mx.cos(angles), mx.sin(angles)


class PatchProjection(nn.Module):
    """A convolution whose stride is its kernel, hence one product per patch: ``[N, C * T * P * P] -> [N, width]``.

    ``weight`` keeps the checkpoint's shape ``[width, C, T, P, P]``.
    """

    def __init__(self, width: int, channels: int, temporal: int, patch: int, bias: bool):
        super().__init__()
        self.weight = mx.zeros((width, channels, temporal, patch, patch))
        if bias:
            self.bias = mx.zeros((width,))

    def __call__(self, x: mx.array) -> mx.array:
        out = x @ self.weight.reshape(self.weight.shape[0], -1).T
        return out + self.bias if "bias" in self else out


class PatchEmbed(nn.Module):
    """What the checkpoints call ``patch_embed``: flattened patches ``[N, C * T * P * P]`` -> ``[N, width]``."""

    def __init__(self, width: int, channels: int, temporal: int, patch: int, *, bias: bool):
        super().__init__()
        self.proj = PatchProjection(width, channels, temporal, patch, bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.proj(x.astype(self.proj.weight.dtype))


class FrameAttention(nn.Module):
    """Full attention among the patches of one frame; no frame sees another. ``[N, width]`` kept."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array], grids: Sequence[Grid]) -> mx.array:
        patches, width = x.shape
        head_dim = width // self.heads
        q, k, v = self.qkv(x).reshape(patches, 3, self.heads, head_dim).transpose(1, 2, 0, 3)[:, None]
        q, k = (a.astype(x.dtype) for a in rope.apply_mrope(q.astype(mx.float32), k.astype(mx.float32), *angles))
        pieces, start = [], 0
        for t, h, w in grids:
            stop = start + t * h * w

            def frames(a: mx.array, first: int = start, last: int = stop, count: int = t) -> mx.array:
                """One image or video of ``a [1, H, N, D]`` as a batch of its frames ``[t, H, h * w, D]``."""
                return a[0, :, first:last].reshape(self.heads, count, -1, head_dim).swapaxes(0, 1)

            out = mx.fast.scaled_dot_product_attention(frames(q), frames(k), frames(v), scale=head_dim**-0.5, mask=None)
            pieces.append(layers.merge_heads(out).reshape(-1, width))
            start = stop
        return self.proj(mx.concatenate(pieces))


class VisionBlock(nn.Module):
    """Pre-norm block with LayerNorm: ``x + attn(norm1(x))``, then ``x + mlp(norm2(x))``. ``[N, width]`` kept."""

    def __init__(self, width: int, heads: int, mlp: nn.Module):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attn = FrameAttention(width, heads)
        self.mlp = mlp

    def __call__(self, x: mx.array, angles: tuple[mx.array, mx.array], grids: Sequence[Grid]) -> mx.array:
        x = x + self.attn(self.norm1(x), angles, grids)
        return x + self.mlp(self.norm2(x))
