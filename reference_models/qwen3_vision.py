"""Qwen3-VL's vision tower: a learned table of positions beside the rotary ones, and DeepStack.

The table is a square; an image stretches it over its own grid, corner on corner, with bilinear weights. DeepStack
(arXiv 2406.04334) takes the patches after some blocks through mergers of their own; the text adds the n-th of these
to its hidden states after layer n.

Sources: see ``vision``. Parameter names are those of the checkpoint below ``visual.``; ``qwen3_vl_moe`` has the same
tower.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar

import mlx.core as mx
from mlx import nn

from reference_models import vision


@dataclass(frozen=True)
class VisionConfig:
    """``vision_config`` of the published config.json.

    ``hidden_size`` is the width of the tower and ``out_hidden_size`` that of the text. Raises ValueError.
    """

    depth: int
    hidden_size: int
    intermediate_size: int
    out_hidden_size: int
    num_heads: int
    num_position_embeddings: int = 2304
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    hidden_act: str = "gelu_pytorch_tanh"
    in_channels: int = 3
    patch_size: int = 16
    spatial_merge_size: int = 2
    temporal_patch_size: int = 2

    frames_apart: ClassVar[bool] = True
    """Each frame of a video is a run of tokens of its own, behind a timestamp in words, and T does not count up."""

    def __post_init__(self) -> None:
        vision.check_tower(
            self.hidden_size,
            self.num_heads,
            self.hidden_act,
            depth=self.depth,
            intermediate_size=self.intermediate_size,
            out_hidden_size=self.out_hidden_size,
            num_position_embeddings=self.num_position_embeddings,
            in_channels=self.in_channels,
            patch_size=self.patch_size,
            spatial_merge_size=self.spatial_merge_size,
            temporal_patch_size=self.temporal_patch_size,
        )
        if isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings ({self.num_position_embeddings}) must be a square number")
        indexes = self.deepstack_visual_indexes
        if len(set(indexes)) < len(indexes) or any(not 0 <= index < self.depth for index in indexes):
            raise ValueError(
                f"deepstack_visual_indexes {list(indexes)} must name different blocks of a tower with {self.depth}"
            )

    @property
    def patch_pixels(self) -> int:
        """Numbers in one flattened patch."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


def check_join(config: VisionConfig, text: Any) -> None:
    """Raise ValueError unless the text can take the features: its config ``text`` has their width, the tokens that
    stand for them, and for each of DeepStack's a layer."""
    vision.check_join("out_hidden_size", config.out_hidden_size, text)
    count = len(config.deepstack_visual_indexes)
    if count > text.num_hidden_layers:
        raise ValueError(
            f"deepstack_visual_indexes makes {count} features, the text has {text.num_hidden_layers} layers"
        )


def axis_taps(size: int, side: int) -> list[tuple[int, int, float]]:
    """For each of ``size`` places on one axis: the two rows of a table of ``side`` around it, and the second's weight.

    The first place stands on the first row and the last place on the last row; a single place on the first.
    """
    taps = []
    for index in range(size):
        at = index * (side - 1) / max(size - 1, 1)
        low = min(int(at), side - 1)
        taps.append((low, min(low + 1, side - 1), at - low))
    return taps


def table_taps(grids: Sequence[vision.Grid], side: int, merge: int) -> tuple[mx.array, mx.array]:
    """Rows of the position table (int32) and their weights (float32, sum 1) for every patch, both ``[patches, 4]``."""
    rows: list[tuple[int, ...]] = []
    weights: list[tuple[float, ...]] = []
    for grid in grids:
        down, across = axis_taps(grid[1], side), axis_taps(grid[2], side)
        places = [(down[row], across[column]) for row, column in vision.patch_coordinates(grid, merge)] * grid[0]
        for (top, bottom, dy), (left, right, dx) in places:
            rows.append((top * side + left, top * side + right, bottom * side + left, bottom * side + right))
            weights.append(((1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx))
    return mx.array(rows, dtype=mx.int32), mx.array(weights, dtype=mx.float32)


class VisionMLP(nn.Module):
    """``linear_fc2(act(linear_fc1(x)))``, ``[N, width]`` kept."""

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._act = vision.ACTIVATIONS[config.hidden_act]

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear_fc2(self._act(self.linear_fc1(x)))


class PatchMerger(nn.Module):
    """``merge ** 2`` neighbouring patches become one token, ``[N, width] -> [N / merge ** 2, out_hidden]``.

    ``norm_blocks``: the norm sees whole merge blocks (DeepStack's mergers) instead of single patches (the last one).
    The GELU is the exact one, whatever ``hidden_act`` says.
    """

    def __init__(self, config: VisionConfig, *, norm_blocks: bool):
        super().__init__()
        self._block = config.hidden_size * config.spatial_merge_size**2
        self._norm_width = self._block if norm_blocks else config.hidden_size
        self.norm = nn.LayerNorm(self._norm_width, eps=vision.NORM_EPS)
        self.linear_fc1 = nn.Linear(self._block, self._block)
        self.linear_fc2 = nn.Linear(self._block, config.out_hidden_size)

    def __call__(self, x: mx.array) -> mx.array:
        x = self.norm(x.reshape(-1, self._norm_width)).reshape(-1, self._block)
        return self.linear_fc2(nn.gelu(self.linear_fc1(x)))


class Tower(nn.Module):
    """What the checkpoint calls ``visual``."""

    frames_apart = VisionConfig.frames_apart

    def __init__(self, config: VisionConfig):
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.patch_embed = vision.PatchEmbed(
            width, config.in_channels, config.temporal_patch_size, config.patch_size, bias=True
        )
        self.pos_embed = nn.Embedding(config.num_position_embeddings, width)
        self.blocks = [vision.VisionBlock(width, config.num_heads, VisionMLP(config)) for _ in range(config.depth)]
        self.merger = PatchMerger(config, norm_blocks=False)
        self.deepstack_merger_list = [PatchMerger(config, norm_blocks=True) for _ in config.deepstack_visual_indexes]

    def __call__(self, pixel_values: mx.array, grids: tuple[vision.Grid, ...]) -> vision.Features:
        """Flattened patches ``[N, patch_pixels]`` of images or videos ``grids`` -> ``[N / merge ** 2, out_hidden]``.

        DeepStack's features come in the order of the blocks. Raises ValueError when the patches are not those of the
        grids.
        """
        config = self.config
        merge = config.spatial_merge_size
        vision.check_pixels(pixel_values, grids, config.patch_pixels)
        angles = vision.rotary_angles(grids, merge, config.hidden_size // config.num_heads)
        rows, weights = table_taps(grids, isqrt(config.num_position_embeddings), merge)
        x = self.patch_embed(pixel_values)
        x = x + (self.pos_embed(rows) * weights[..., None]).sum(axis=1).astype(x.dtype)
        deepstack = []
        for index, block in enumerate(self.blocks):
            x = block(x, angles, grids)
            if index in config.deepstack_visual_indexes:
                merger = self.deepstack_merger_list[config.deepstack_visual_indexes.index(index)]
                deepstack.append(merger(x))
        return vision.Features(self.merger(x), tuple(deepstack))


def tiny(**changes: object) -> VisionConfig:
    """The simplest tiny tower of both families, changed."""
    fields: dict[str, object] = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "out_hidden_size": 32,
        "num_heads": 2,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": (0, 2),
        "patch_size": 4,
    }
    return VisionConfig(**(fields | changes))  # type: ignore[arg-type]
