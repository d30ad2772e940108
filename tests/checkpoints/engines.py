"""Prompts with images in other engines, and how they are compared with ours."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from harness.checkpoints import Inputs, greedy, load_model, logits, open_checkpoint
from tests.checkpoints.prompts import as_torch, prompt

PARITY = "the published implementations are not installed: pip install 'mlx-kv-harness[peers]'"
MLX_VLM = "mlx-vlm is not installed: pip install 'mlx-kv-harness[mlx-vlm]'"
STEPS = 6
TOLERANCE = 5e-5  # of the deviation of the logits
Forward = Callable[[Inputs], np.ndarray]


def with_transformers(folder: Path) -> Forward:
    import torch
    import transformers

    model, said = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not said["unexpected_keys"] and not said["missing_keys"] and not said["mismatched_keys"]

    def forward(inputs: Inputs) -> np.ndarray:
        with torch.no_grad():
            return model.eval()(**as_torch(inputs), use_cache=False).logits.numpy()

    return forward


def with_mlx_vlm(folder: Path) -> Forward:
    import mlx.core as mx
    from mlx import nn
    from mlx_vlm.utils import load_model as load

    model = load(folder)
    model.set_dtype(mx.float32)
    for path, module in model.vision_tower.named_modules():
        if "act_fn" in module.children() and path:
            # The tower of qwen3_vl_moe in mlx-vlm 0.7.10 has these the wrong way round (1e-3 of the logits).
            module.act_fn = nn.GELU() if "merger" in path else nn.GELU(approx="tanh")

    def forward(inputs: Inputs) -> np.ndarray:
        names = ("image_grid_thw", "video_grid_thw", "pixel_values", "pixel_values_videos")
        given = {name: getattr(inputs, name) for name in names}
        arrays = {name: mx.array(array) for name, array in given.items() if array is not None}
        model.language_model._position_ids = None  # of the last prompt, if this one has no image
        out = model(mx.array(inputs.ids), arrays.pop("pixel_values", None), **arrays)
        return np.array(out.logits.astype(mx.float32))

    return forward


def longer(inputs: Inputs, tokens: np.ndarray) -> Inputs:
    """The prompts with ``tokens [B, 1]`` of text behind them."""

    def behind(array: np.ndarray, more: np.ndarray) -> np.ndarray:
        return np.concatenate([array, more], axis=1)

    assert inputs.attention_mask is not None and inputs.mm_token_type_ids is not None
    return dataclasses.replace(
        inputs,
        ids=behind(inputs.ids, tokens),
        attention_mask=behind(inputs.attention_mask, np.ones_like(tokens)),
        mm_token_type_ids=behind(inputs.mm_token_type_ids, np.zeros_like(tokens)),
    )


def agree(
    folder: Path,
    other: Forward,
    names: Iterable[str],
    tolerance: float = TOLERANCE,
    dtype: str | None = None,
    steps: int = STEPS,
) -> None:
    """Logits of the prompts of those names, and greedy tokens behind them unless a placeholder is among these."""
    model, names = load_model(open_checkpoint(folder), dtype), list(names)
    config = model.config
    continued = 0
    for name in names:
        inputs = prompt(config, name)
        theirs = other(inputs)
        off = float(np.abs(logits(model, inputs) - theirs).max() / theirs.std())
        print(f"{config.__class__.__module__} {name}: {off:.1e} of the deviation of the logits")
        assert off <= tolerance, f"{name}: logits differ by {off:.1e} of their deviation"
        mine = greedy(model, inputs, steps)
        if np.isin(mine, (config.image_token_id, config.video_token_id)).any():
            continue
        said = []
        for _ in range(steps):
            said.append(other(inputs)[:, -1:].argmax(-1))
            inputs = longer(inputs, said[-1])
        np.testing.assert_array_equal(mine, np.concatenate(said, axis=1), err_msg=name)
        continued += 1
    assert continued > len(names) // 2


#: mlx-vlm takes images or videos, not both; and one row, whose images stand in one batch.
ONE_ROW = ("text", "image", "two images", "video")
