"""When a peer fails: what the entries of ``limitations`` ask of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from reference_models import mrope_ids, rope
from tests.parity.cases import Case


def _vision(case: Case) -> Any:
    return getattr(case.config, "vision", None)


def tower(test: Callable[[Any], bool]) -> Callable[[Case], bool]:
    """A condition on the vision config; a model of text alone never meets it."""
    return lambda case: _vision(case) is not None and test(_vision(case))


def turned(case: Case) -> float:
    """The largest angle, in radians, by which the place of a token in its picture turns it away from that of text."""
    config = case.config
    places = mrope_ids.Placeholders(
        config.image_token_id, config.video_token_id, config.vision.spatial_merge_size, case.family != "qwen2_vl"
    )
    ids, _ = mrope_ids.position_ids(case.tokens, case.grids("image"), case.grids("video"), places)
    scaling = config.rope_scaling
    axes = np.array(rope.mrope_axes(scaling.mrope_section, scaling.mrope_interleaved))
    away = np.array(ids)[axes, 0] - np.arange(len(case.tokens))
    return float(np.abs(away / np.array(rope.standard_freqs(config.head_dim, config.rope_theta))[:, None]).max())


def long_video(case: Case) -> bool:
    """A video whose frames outnumber its rows and its columns, so that T is its largest id, and tokens behind it."""
    if not case.pictures:
        return False
    merge = case.config.vision.spatial_merge_size
    ends = case.tokens[-1] == case.config.video_token_id
    followed = case.pictures[:-1] if ends else case.pictures
    return any(picture.kind == "video" and picture.grid[0] > max(picture.grid[1:]) // merge for picture in followed)


def bare(case: Case) -> bool:
    """A picture without its start token, whose ids are not by chance those of text."""
    return case.bare and turned(case) > 0


def shortest_window(case: Case) -> float:
    """The fewest keys that a layer shows a token; infinite without sliding windows."""
    windows = getattr(case.config, "windows", ())
    return min((window for window in windows if window is not None), default=float("inf"))


def longest_window(case: Case) -> float:
    """The most keys that a layer shows a token; infinite where a layer has no sliding window."""
    windows = getattr(case.config, "windows", ()) or (None,)
    return max(float("inf") if window is None else window for window in windows)


def mistaken_patches(vision: Any) -> bool:
    """The published weight of the patch embedding ``[width, C, T, P, P]`` looks as if its channels came last."""
    channels, frames, size = vision.in_channels, vision.temporal_patch_size, vision.patch_size
    taken = size == 3 or (channels >= frames and channels >= size and frames == size)
    return taken and (channels, frames, size, size) != (frames, size, size, channels)


def unscaled_yarn(case: Case) -> bool:
    """One of YaRN's two corrections is 0, the other is not, and something is stretched."""
    scaling = case.config.rope_parameters
    return scaling.mscale == 0 and scaling.mscale_all_dim != 0 and scaling.factor > 1


def few_experts(case: Case) -> bool:
    """An expert layer whose groups hold one expert each."""
    config = case.config
    return config.n_routed_experts // config.n_group < 2 and config.first_k_dense_replace < config.num_hidden_layers


def long_pattern(case: Case) -> bool:
    """The pattern of a cohere2, 4 where its config has none, reaches beyond the last layer."""
    return (case.config.sliding_window_pattern or 4) > case.config.num_hidden_layers


def layer_types_as_patterns_of_four(case: Case) -> bool:
    """``layer_types`` of a cohere2 that a pattern of four would not give, in a model that has four layers."""
    config = case.config
    by_four = [None if number % 4 == 0 else config.sliding_window for number in range(1, config.num_hidden_layers + 1)]
    return config.layer_types is not None and not long_pattern(case) and list(config.windows) != by_four


def own_attention_factor(case: Case) -> bool:
    """An olmo3 whose layers that see everything scale what they rotated by another number than YaRN's own."""
    scaling = case.config.rope_scaling
    if scaling is None or all(case.config.windows):
        return False
    return bool(scaling.amplitude != rope.yarn_mscale(scaling.factor, 1.0))


def factors_matter(case: Case) -> bool:
    """A minicpm3 that turns otherwise by its long factors than by its short ones."""
    return bool(case.config.rope_scaling.short_factor != case.config.rope_scaling.long_factor)


def made_for_more(case: Case) -> bool:
    """A minicpm3 that is made for a longer context than it had at first."""
    return bool(case.config.max_position_embeddings > case.config.rope_scaling.original_max_position_embeddings)


def within_original(case: Case) -> bool:
    """A prompt no longer than the original context of a minicpm3."""
    return len(case.tokens) <= case.config.rope_scaling.original_max_position_embeddings
