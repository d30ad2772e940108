"""Images and videos among the tokens of a prompt, as values, and the M-RoPE ids that follow from them.

Sizes are in tokens: one token stands for one merged block of patches. Nothing here knows pixels or a model; the ids are
written a second time on purpose (the models have their own), so that two halves can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

Place = tuple[int, int, int]
"""The T, H and W id of a token."""

MAX_MEDIA = 16  # of one prompt
MAX_SIDE = 1 << 10


class MediaError(ValueError):
    """An image or a video that cannot stand in a prompt; one line."""


@dataclass(frozen=True)
class Media:
    """An image of ``rows`` x ``columns`` tokens whose first one stands at position ``at``; with ``frames`` > 0 a video
    of so many temporal patches."""

    at: int
    rows: int
    columns: int
    frames: int = 0

    def __post_init__(self) -> None:
        for name, low in (("at", 0), ("rows", 1), ("columns", 1), ("frames", 0)):
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= MAX_SIDE:
                raise MediaError(f"an image's {name} must be a whole number in [{low}, {MAX_SIDE}], got {value!r:.60}")

    def __str__(self) -> str:
        """``image 2x3@4``, or ``video 2x2x3@4`` with its frames in front."""
        size = f"{self.rows}x{self.columns}@{self.at}"
        return f"video {self.frames}x{size}" if self.frames else f"image {size}"

    @property
    def end(self) -> int:
        """The first position behind it and behind the one token that must follow every frame, for two runs of
        placeholders need a token between them."""
        return self.at + max(self.frames, 1) * (self.rows * self.columns + 1)

    def runs(self, apart: bool) -> Iterator[Run]:
        """Its runs of placeholders: one, or one for each frame of a video (``apart``: a token lies between them)."""
        if self.frames and apart:
            for frame in range(self.frames):
                yield Run(self.at + frame * (self.rows * self.columns + 1), 1, self.rows, self.columns, True)
        else:
            yield Run(self.at, max(self.frames, 1), self.rows, self.columns, bool(self.frames))

    def to_json(self) -> dict[str, int]:
        return {"at": self.at, "rows": self.rows, "columns": self.columns, "frames": self.frames}


@dataclass(frozen=True)
class Run:
    """Consecutive placeholders of one grid, from position ``start`` on."""

    start: int
    frames: int
    rows: int
    columns: int
    video: bool

    @property
    def positions(self) -> range:
        return range(self.start, self.start + self.frames * self.rows * self.columns)


def check_media(media: Sequence[Media], most: int) -> None:
    """MediaError unless they follow one another, each behind the end of the one before, within ``most`` positions."""
    if len(media) > MAX_MEDIA:
        raise MediaError(f"a prompt has at most {MAX_MEDIA} images, got {len(media)}")
    free = 0
    for each in media:
        if each.at < free:
            raise MediaError(f"{each} starts before position {free}, where the one before it and a token behind it end")
        free = each.end
    if free > most:
        raise MediaError(f"a prompt ends at position {most} at the latest, its last image at {free}")


def media_from_json(data: object) -> tuple[Media, ...]:
    """Inverse of ``[each.to_json() for each in media]``; MediaError for anything else."""
    if not isinstance(data, list) or len(data) > MAX_MEDIA:
        raise MediaError(f"media must be a list of at most {MAX_MEDIA} objects, got {data!r:.60}")
    return tuple(_media_from_json(each) for each in data)


def _media_from_json(data: Any) -> Media:
    fields = {"at", "rows", "columns", "frames"}
    if not isinstance(data, dict) or set(data) != fields:
        raise MediaError(f"media must hold objects with exactly {', '.join(sorted(fields))}, got {data!r:.60}")
    return Media(**data)


def runs(media: Sequence[Media], apart: bool) -> list[Run]:
    """All runs of placeholders, in order."""
    return [run for each in media for run in each.runs(apart)]


def places(media: Sequence[Media], apart: bool, length: int) -> list[Place]:
    """The M-RoPE ids of the first ``length`` positions of a prompt.

    Text counts up all three ids together. The token of frame t, row h and column w of a grid has ``(s + t, s + h,
    s + w)`` with s one above the largest id so far, and so goes on what follows (Qwen2-VL, arXiv 2409.12191).
    """
    found: list[Place] = []
    free = 0
    for run in runs(media, apart):
        found += [(free + i,) * 3 for i in range(run.start - len(found))]
        start = free = max(found[-1]) + 1 if found else 0
        for t, h, w in product(range(run.frames), range(run.rows), range(run.columns)):
            found.append((start + t, start + h, start + w))
        free = start + max(run.frames, run.rows, run.columns)
    found += [(free + i,) * 3 for i in range(length - len(found))]
    return found[:length]
