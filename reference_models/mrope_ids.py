"""M-RoPE position ids of a prompt that mixes text with images and videos.

Text counts up all three ids together. A run of image tokens gets the place of each token in its grid: with the next
free id ``s``, the token of frame ``t``, row ``h``, column ``w`` has ``(s + t, s + h, s + w)``, and what follows goes on
one above the largest id so far. A long run of tokens thus uses few ids, and whatever comes after the prompt stands at
``offset + rope_delta``.

Videos. Qwen2-VL keeps a video in one run, whose frames count up T. Qwen3-VL writes every frame as a run of its own
behind a timestamp in words, so each frame is an image to these ids (``frames_apart``).

Sources: Qwen2-VL (arXiv 2409.12191, section 2.1), Qwen3-VL (arXiv 2511.21631) and their published code. Transformers 5
goes on behind a video at ``s + max(h, w)``, which is lower where a video has more frames than rows and columns; the
paper and the code that came with the checkpoints do as here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import mlx.core as mx

from reference_models.vision import Grid

Place = tuple[int, int, int]


@dataclass(frozen=True)
class Placeholders:
    """Which tokens stand for features, and how these were made."""

    image_token_id: int
    video_token_id: int
    merge: int
    frames_apart: bool


def position_ids(
    tokens: Sequence[int], image_grids: Sequence[Grid], video_grids: Sequence[Grid], placeholders: Placeholders
) -> tuple[mx.array, int]:
    """Ids int32 ``[3, 1, S]`` of ``tokens`` and the ``rope_delta`` of what follows them.

    Grids are taken in order, one for each run of equal image (video) tokens. Raises ValueError, with the counts,
    when runs and grids do not fit, or when there is no token.
    """
    if not tokens:
        raise ValueError("a prompt needs at least one token")
    waiting = _grids_by_token(tokens, image_grids, video_grids, placeholders)
    places: list[Place] = []
    start = 0
    for token, run in groupby(tokens, key=lambda token: token if token in waiting else None):
        length = sum(1 for _ in run)
        if token is None:
            fresh = [(start + i,) * 3 for i in range(length)]
        else:
            name, grid = next(waiting[token])
            fresh = grid_places(grid, placeholders.merge, start)
            if len(fresh) != length:
                raise ValueError(
                    f"{name} has grid {grid}, which makes {len(fresh)} tokens, but the run at position {len(places)} "
                    f"has {length}"
                )
        places += fresh
        start = max(map(max, fresh)) + 1
    return mx.array(places, dtype=mx.int32).T[:, None], rope_delta(places)


def rope_delta(places: Sequence[Place]) -> int:
    """``rope_delta`` behind tokens with these ids: how far the next id lies from the next offset."""
    return max(map(max, places)) + 1 - len(places)


def grid_places(grid: Grid, merge: int, start: int) -> list[Place]:
    """Ids of the tokens of one image or video: frame by frame, row by row, merge blocks taken as one."""
    frames, height, width = grid
    return [
        (start + t, start + h, start + w)
        for t in range(frames)
        for h in range(height // merge)
        for w in range(width // merge)
    ]


def _grids_by_token(
    tokens: Sequence[int], image_grids: Sequence[Grid], video_grids: Sequence[Grid], placeholders: Placeholders
) -> dict[int, Iterator[tuple[str, Grid]]]:
    """The named grids that the runs of each placeholder will take. ValueError when their numbers differ."""
    if placeholders.frames_apart:
        video_name, videos = "video frame", [(1, h, w) for t, h, w in video_grids for _ in range(t)]
    else:
        video_name, videos = "video", list(video_grids)
    kinds = {
        placeholders.image_token_id: ("image", list(image_grids)),
        placeholders.video_token_id: (video_name, videos),
    }
    runs = [token for token, _ in groupby(tokens)]
    for token, (name, grids) in kinds.items():
        if runs.count(token) != len(grids):
            raise ValueError(
                f"the prompt has {runs.count(token)} runs of {name} tokens (id {token}), but there are "
                f"{len(grids)} {name} grids; two runs need a token between them"
            )
    return {
        token: iter([(f"{name} {number}", grid) for number, grid in enumerate(grids)])
        for token, (name, grids) in kinds.items()
    }
