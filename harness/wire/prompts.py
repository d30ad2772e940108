"""Prompts with images over the wire: what a worker refuses of them, and what the check of a worker sends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from harness.images import placed_for, prompt_input
from harness.media import Media, places
from harness.target import ImageFormat, PromptInput

_IMAGE = Media(1, 1, 2)


def an_image(images: ImageFormat, vocab_size: int) -> PromptInput:
    """A short prompt: text, an image of two tokens, and text behind it."""
    media = placed_for((_IMAGE,), images)
    return prompt_input(0, media, media[0].end + 1, vocab_size, images)


def places_of(images: ImageFormat, count: int) -> np.ndarray[Any, Any]:
    """The M-RoPE ids [3, count] of ``an_image``."""
    return np.array(places(placed_for((_IMAGE,), images), images.frames_apart, count)).T


def another_picture(prompt: PromptInput) -> PromptInput:
    """The same tokens, and an image of the same size that shows something else."""
    pixels = prompt.pixel_values
    return prompt if pixels is None else replace(prompt, pixel_values=np.ascontiguousarray(pixels[::-1]))


def wrong_format(images: ImageFormat, vocab_size: int) -> str | None:
    """What makes no sense in how an engine wants its images, in one line; None for nothing."""
    special = {images.image_token, images.video_token, images.start_token} - {None}
    if not all(0 <= token < vocab_size for token in special if token is not None):
        return f"their tokens must be from 0 to {vocab_size - 1}"
    if images.image_token == images.start_token or images.video_token == images.start_token:
        return "the token in front of one stands for one"
    if vocab_size - len(special) < 2:
        return "they leave fewer than two tokens to text"
    if images.merge < 1 or images.patch_pixels < 1:
        return "merge and patch_pixels must be above 0"
    return None


def wrong_with(prompt: PromptInput, images: ImageFormat, vocab_size: int) -> str | None:
    """What makes no sense in a prompt, in one line; None for nothing."""
    if not prompt.tokens or not all(0 <= token < vocab_size for token in prompt.tokens):
        return f"tokens must be at least one, each from 0 to {vocab_size - 1}"
    for what, token, pixels, grids in (
        ("image", images.image_token, prompt.pixel_values, prompt.image_grid_thw),
        ("video", images.video_token, prompt.pixel_values_videos, prompt.video_grid_thw),
    ):
        if wrong := _wrong_kind(prompt.tokens.count(token), pixels, grids, images):
            return f"of its kind {what!r}: {wrong}"
    return None


def _wrong_kind(placeholders: int, pixels: Any, grids: Any, images: ImageFormat) -> str | None:
    if pixels is None and grids is None:
        return f"{placeholders} tokens stand for what is not given" if placeholders else None
    if pixels is None or grids is None:
        return "it has pixels and no grid, or a grid and no pixels"
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.dtype.kind not in "iu" or not len(grids) or (grids < 1).any():
        return "a grid is [n, 3] whole numbers above 0"
    patches = int(grids.astype(np.int64).prod(axis=1).sum())
    if pixels.shape != (patches, images.patch_pixels) or pixels.dtype.kind != "f":
        return f"pixels of the shape {list(pixels.shape)}, its grids have {patches} patches of {images.patch_pixels}"
    if placeholders * images.merge**2 != patches:
        return f"{placeholders} tokens stand for {patches} patches, {images.merge**2} to a token"
    return None
