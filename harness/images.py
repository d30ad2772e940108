"""What a target is given for a prompt with images: token ids, pixels and grids, derived from the operation alone.

Everything is a function of the sequence's number and of the operation, so ``Prefill(12, image 2x2@3)`` says it all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from harness.media import Media, MediaError, runs
from harness.target import ImageFormat, PromptInput

MAX_PIXELS = 1 << 22  # 16 MB
MAX_PATCHES = 1 << 11

_Floats = np.ndarray[Any, Any]


def token_ids(
    sequence: int, count: int, start: int, vocab_size: int, images: ImageFormat | None = None
) -> tuple[int, ...]:
    """Ids of the text tokens number start .. start + count - 1 that a sequence ever processes.

    They depend on how many tokens the sequence has processed, not on their position: after a rollback the same
    position gets another token, so a stale row cannot pass for a fresh one.  A multiplicative hash spreads them over
    the vocabulary, less the tokens that stand for images or in front of them.
    """
    special = {images.image_token, images.video_token, images.start_token} if images else set()
    placeholders = sorted(token for token in special if token is not None)
    ids = []
    for number in range(start, start + count):
        spread = ((sequence + 1) * 0x9E3779B1 + number * 0x85EBCA6B + (number >> 3) * 0xC2B2AE35) & 0xFFFFFFFF
        token = spread % (vocab_size - len(placeholders))
        for taken in placeholders:
            token += token >= taken
        ids.append(token)
    return tuple(ids)


def placed_for(media: Sequence[Media], images: ImageFormat) -> tuple[Media, ...]:
    """Where they stand in a prompt of this target: one further each where a token must stand in front of the first."""
    moved = bool(media) and images.start_token is not None and media[0].at == 0
    return tuple(replace(each, at=each.at + 1) for each in media) if moved else tuple(media)


def prompt_input(
    sequence: int, media: Sequence[Media], count: int, vocab_size: int, images: ImageFormat, start: int = 0
) -> PromptInput:
    """The prompt of a sequence: ``count`` tokens, or up to the end of its last image where that is further.

    ``start``: how many tokens the sequence has processed before (it was reset). Text and pixels are then others.
    ``media``: as ``placed_for`` puts them. Raises MediaError, before anything is made, for images that would need
    absurdly much memory.
    """
    check_size(media, images)
    placed = runs(media, images.frames_apart)
    tokens = list(token_ids(sequence, max(count, placed[-1].positions.stop), start, vocab_size, images))
    for run in placed:
        token = images.video_token if run.video else images.image_token
        tokens[run.start : run.positions.stop] = [token] * len(run.positions)
        if images.start_token is not None:
            tokens[run.start - 1] = images.start_token
    stills = [each for each in media if not each.frames]
    videos = [each for each in media if each.frames]
    return PromptInput(
        tuple(tokens),
        *_pixels_and_grids(sequence, start, stills, images),
        *_pixels_and_grids(sequence, start, videos, images),
    )


def check_size(media: Sequence[Media], images: ImageFormat) -> None:
    """MediaError for more than MAX_PIXELS numbers in all, or more than MAX_PATCHES patches in an image or a frame, each
    of which a tower lets see all the others."""
    patches = [each.rows * each.columns * images.merge**2 for each in media]
    numbers = sum(max(each.frames, 1) * n for each, n in zip(media, patches, strict=True)) * images.patch_pixels
    if numbers > MAX_PIXELS or max(patches, default=0) > MAX_PATCHES:
        raise MediaError(
            f"its images have {numbers:,} numbers and {max(patches):,} patches in the largest; at most {MAX_PIXELS:,} "
            f"and {MAX_PATCHES:,} are made"
        )


def _pixels_and_grids(
    sequence: int, start: int, media: Sequence[Media], images: ImageFormat
) -> tuple[_Floats | None, _Floats | None]:
    """Patches of all of them one after the other, and their grids in patches; (None, None) for nothing."""
    if not media:
        return None, None
    grids = [(max(each.frames, 1), each.rows * images.merge, each.columns * images.merge) for each in media]
    patches = [
        _noise(
            (sequence + 1) * 0x9E3779B1 + each.at * 0x85EBCA6B + start * 0xC2B2AE35,
            frames * height * width * images.patch_pixels,
        )
        for each, (frames, height, width) in zip(media, grids, strict=True)
    ]
    return np.concatenate(patches).reshape(-1, images.patch_pixels), np.array(grids, np.int64)


def _noise(key: int, count: int) -> _Floats:
    """``count`` float32 numbers in [-1, 1), the same everywhere for one ``key``: a hash of their index (the finaliser
    of MurmurHash3), since random generators promise no values across releases."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(key & 0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float32) / np.float32(1 << 23) - np.float32(1)
