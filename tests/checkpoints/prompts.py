"""Prompts with images and videos for tests: what a processor makes of them, built by hand from random patches."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.checkpoints import Inputs

Grid = tuple[int, int, int]

#: Name -> rows; a row is a list of runs: a number of words, or a kind with its grid in merge blocks.
PROMPTS: dict[str, list[list[Any]]] = {
    "text": [[12], [12]],
    "image": [[3, ("image", (1, 2, 3)), 4]],
    "two images": [[2, ("image", (1, 2, 1)), 1, ("image", (1, 3, 2)), 3]],
    "video": [[2, ("video", (2, 2, 2)), 3]],
    "image and video": [[1, ("image", (1, 1, 2)), 2, ("video", (3, 3, 1)), 2]],
    "batch": [[2, ("image", (1, 2, 2)), 3, ("image", (1, 2, 1)), 1], [4, ("image", (1, 2, 3)), 4]],
    "batch of one image": [[9, ("image", (1, 1, 1)), 2], [14]],
}


def prompt(config: Any, name: str, seed: int = 0) -> Inputs:
    """The prompt of that name for a model with this config; words are ids below every special token."""
    rng = np.random.default_rng(seed)
    tower = config.vision
    merge, words = tower.spatial_merge_size, config.image_token_id - 6
    start, end = config.image_token_id - 2, config.image_token_id - 1  # of vision, in every config of these tests
    grids: dict[str, list[Grid]] = {"image": [], "video": []}
    rows = []
    for runs in PROMPTS[name]:
        ids: list[int] = []
        for run in runs:
            if isinstance(run, int):
                ids += rng.integers(0, words, run).tolist()
                continue
            kind, (t, h, w) = run
            grids[kind].append((t, h * merge, w * merge))
            token = getattr(config, f"{kind}_token_id")
            frames = t if kind == "video" and tower.frames_apart else 1
            for _ in range(frames):
                ids += rng.integers(0, words, 2).tolist() * (frames > 1)  # for a timestamp
                ids += [start, *[token] * (t * h * w // frames), end]
        rows.append(ids)
    arrays: dict[str, Any] = {"ids": np.array(rows)}
    for kind, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            patches = sum(t * h * w for t, h, w in grids[kind])
            arrays[pixels] = rng.standard_normal((patches, tower.patch_pixels)).astype(np.float32)
            arrays[f"{kind}_grid_thw"] = np.array(grids[kind])
    types = (arrays["ids"] == config.image_token_id) + 2 * (arrays["ids"] == config.video_token_id)
    return Inputs(**arrays, mm_token_type_ids=types, attention_mask=np.ones_like(types))


def as_torch(inputs: Inputs) -> dict[str, Any]:
    """The same for a model of transformers."""
    import torch

    given = {name: array for name, array in vars(inputs).items() if array is not None}
    given["input_ids"] = given.pop("ids")
    if not inputs.has_images:
        del given["mm_token_type_ids"]
    return {name: torch.from_numpy(array) for name, array in given.items()}
