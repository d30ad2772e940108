"""Qwen2-VL's vision tower: LayerNorm blocks with quick-GELU, 2-D rotary positions, one merger at the end.

Sources: see ``vision``. Parameter names are those of the checkpoint below ``visual.``.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn

from reference_models import vision


@dataclass(frozen=True)
class VisionConfig:
    """``vision_config`` of the published config.json (``in_channels`` may be called ``in_chans`` there).

    ``embed_dim`` is the width of the tower and ``hidden_size`` that of the text. Raises ValueError.
    """

    depth: int
    embed_dim: int
    hidden_size: int
    num_heads: int
    mlp_ratio: int = 4
    hidden_act: str = "quick_gelu"
    in_channels: int = 3
    patch_size: int = 14
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2

    frames_apart: ClassVar[bool] = False
    """A video is one run of tokens, and its frames count up the T position."""

    def __post_init__(self) -> None:
        vision.check_tower(
            self.embed_dim,
            self.num_heads,
            self.hidden_act,
            depth=self.depth,
            hidden_size=self.hidden_size,
            mlp_ratio=self.mlp_ratio,
            in_channels=self.in_channels,
            patch_size=self.patch_size,
            spatial_merge_size=self.spatial_merge_size,
            temporal_patch_size=self.temporal_patch_size,
        )

    @property
    def patch_pixels(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


def check_join(config: VisionConfig, text: Any) -> None:
    """Raise ValueError unless the text's config has the width of the features and the tokens that stand for them."""
    vision.check_join("hidden_size", config.hidden_size, text)


class VisionMLP(nn.Module):
    """``fc2(act(fc1(x)))``, ``[N, width]`` kept."""

    def __init__(self, width: int, inner: int, hidden_act: str):
        super().__init__()
        self.fc1 = nn.Linear(width, inner)
        self.fc2 = nn.Linear(inner, width)
        self._act = vision.ACTIVATIONS[hidden_act]

    def __call__(self, x: mx.array) -> mx.array:
        return self.fc2(self._act(self.fc1(x)))


class PatchMerger(nn.Module):
    """``merge ** 2`` neighbouring patches become one token, ``[N, width] -> [N / merge ** 2, hidden]``.

    The norm sees single patches; the GELU between the two products is the exact one.
    """

    def __init__(self, width: int, merge: int, hidden: int):
        super().__init__()
        self.ln_q = nn.LayerNorm(width, eps=vision.NORM_EPS)
        self._block = block = width * merge**2
        self.mlp = [nn.Linear(block, block), nn.GELU(), nn.Linear(block, hidden)]

    def __call__(self, x: mx.array) -> mx.array:
        first, act, last = self.mlp
        return last(act(first(self.ln_q(x).reshape(-1, self._block))))


class Tower(nn.Module):
    """What the checkpoint calls ``visual``."""

    frames_apart = VisionConfig.frames_apart

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        width, heads = config.embed_dim, config.num_heads
        self.patch_embed = vision.PatchEmbed(
            width, config.in_channels, config.temporal_patch_size, config.patch_size, bias=False
        )
        self.blocks = [
            vision.VisionBlock(width, heads, VisionMLP(width, width * config.mlp_ratio, config.hidden_act))
            for _ in range(config.depth)
        ]
        self.merger = PatchMerger(width, config.spatial_merge_size, config.hidden_size)

    def __call__(self, pixel_values: mx.array, grids: tuple[vision.Grid, ...]) -> vision.Features:
        """Flattened patches ``[N, patch_pixels]`` of images or videos ``grids`` -> ``[N / merge ** 2, hidden]``.

        Raises ValueError when the patches are not those of the grids.
        """
        config = self.config
        vision.check_pixels(pixel_values, grids, config.patch_pixels)
        angles = vision.rotary_angles(grids, config.spatial_merge_size, config.embed_dim // config.num_heads)
        x = self.patch_embed(pixel_values)
        for block in self.blocks:
            x = block(x, angles, grids)
        return vision.Features(self.merger(x))


def tiny(**changes: object) -> VisionConfig:
    """The simplest tiny tower, changed."""
    fields: dict[str, object] = {
        "depth": 2,
        "embed_dim": 32,
        "hidden_size": 32,
        "num_heads": 2,
        "mlp_ratio": 2,
        "patch_size": 4,
    }
    return VisionConfig(**(fields | changes))  # type: ignore[arg-type]
