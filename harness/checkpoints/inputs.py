"""What ``logits`` is given: token ids, and images and videos as the processors of transformers make them.

Everything is checked before anything is computed; every error is one line that begins with the array's name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.checkpoints.errors import CheckpointError

Array = NDArray[Any]
Grid = tuple[int, int, int]

#: Kind -> its pixels, its grids, and the number that ``mm_token_type_ids`` gives its tokens.
_KINDS = {
    "image": ("pixel_values", "image_grid_thw", 1),
    "video": ("pixel_values_videos", "video_grid_thw", 2),
}
_LARGEST_SIDE = 1 << 20  # patches; a product of three of these still is a number that NumPy and MLX can hold


@dataclass(frozen=True, eq=False)
class Inputs:
    """``ids`` whole numbers [B, T]; the rest as in ``reference_models.prompt.Images``: float [patches, pixels of a
    patch] and whole numbers [n, 3]. Images (videos) are ordered over the rows of ``ids``, then along each.

    ``attention_mask``, ``mm_token_type_ids``: processors make these too; they may be there, and must say nothing new.
    """

    ids: Array
    pixel_values: Array | None = None
    image_grid_thw: Array | None = None
    pixel_values_videos: Array | None = None
    video_grid_thw: Array | None = None
    attention_mask: Array | None = None
    mm_token_type_ids: Array | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Inputs:
        """From arrays by name; a processor's ``input_ids`` are taken for ``ids``. CheckpointError for missing ids, and
        for a name that means nothing here."""
        if "input_ids" in arrays and "ids" not in arrays:
            arrays = {"ids" if name == "input_ids" else name: array for name, array in arrays.items()}
        known = list(cls.__dataclass_fields__)
        if "ids" not in arrays:
            raise CheckpointError(f"holds no array called ids; it has {', '.join(arrays) or 'none'}")
        if unknown := [name for name in arrays if name not in known]:
            raise CheckpointError(f"{unknown[0]}: unknown array; known are {', '.join(known)}")
        return cls(**arrays)

    @property
    def has_images(self) -> bool:
        """Whether there are images or videos."""
        return self.pixel_values is not None or self.pixel_values_videos is not None


@dataclass(frozen=True, eq=False)
class Row:
    """One sequence: ``ids [1, T]``, and its own images and videos under the names of ``Inputs``, none where it has
    none."""

    ids: Array
    arrays: Mapping[str, Array]


def check_ids(ids: Array, vocab_size: int) -> None:
    """CheckpointError unless ``ids`` is a non-empty integer [B, T] inside the vocabulary."""
    if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        raise CheckpointError(f"ids must be whole numbers [B, T], not {ids.dtype} {list(ids.shape)}")
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise CheckpointError(f"ids must lie in 0..{vocab_size - 1}; they reach from {ids.min()} to {ids.max()}")


def rows_of(inputs: Inputs, config: Any) -> tuple[Row, ...]:
    """The sequences of a batch, each with its share of the images, as its runs of placeholders show it.

    ``config``: of the family. CheckpointError names the array.
    """
    check_ids(inputs.ids, config.vocab_size)
    if inputs.attention_mask is not None:
        _check_mask(inputs.attention_mask, inputs.ids)
    tower = getattr(config, "vision", None)
    grids = {kind: _grids(inputs, kind, tower) for kind in _KINDS}
    types = np.zeros(inputs.ids.shape, dtype=np.int64)
    shares: list[dict[str, Array]] = [{} for _ in inputs.ids]
    if tower is not None:
        for kind, (_, _, number) in _KINDS.items():
            token = getattr(config, f"{kind}_token_id")
            types[inputs.ids == token] = number
            _share_out(inputs, kind, token, grids[kind], tower, shares)
    if inputs.mm_token_type_ids is not None and not np.array_equal(inputs.mm_token_type_ids, types):
        raise CheckpointError("mm_token_type_ids: does not say where the placeholders in ids are (1 image, 2 video)")
    return tuple(Row(ids[None], share) for ids, share in zip(inputs.ids, shares, strict=True))


def _check_mask(mask: Array, ids: Array) -> None:
    if mask.shape != ids.shape:
        raise CheckpointError(f"attention_mask must be {list(ids.shape)} as ids, not {list(mask.shape)}")
    if not np.all(mask == 1):
        raise CheckpointError("attention_mask: padding is not handled; give rows of one length, or one row at a time")


def _grids(inputs: Inputs, kind: str, tower: Any) -> list[Grid]:
    """The grids of a kind. CheckpointError unless pixels and grids fit each other and the tower."""
    pixels_name, grid_name, _ = _KINDS[kind]
    pixels, grids = getattr(inputs, pixels_name), getattr(inputs, grid_name)
    if pixels is None and grids is None:
        return []
    if pixels is None or grids is None:
        here, absent = (pixels_name, grid_name) if grids is None else (grid_name, pixels_name)
        raise CheckpointError(f"{here}: comes without {absent}; they belong together")
    if tower is None:
        raise CheckpointError(f"{pixels_name}: this checkpoint has no vision tower that we read; give ids alone")
    if grids.ndim != 2 or grids.shape[1] != 3 or not len(grids) or grids.dtype.kind not in "iu":
        raise CheckpointError(f"{grid_name} must be whole numbers [n, 3], not {grids.dtype} {list(grids.shape)}")
    if pixels.ndim != 2 or pixels.dtype.kind != "f" or pixels.shape[1] != tower.patch_pixels:
        raise CheckpointError(
            f"{pixels_name} must be floats [patches, {tower.patch_pixels}], not {pixels.dtype} {list(pixels.shape)}"
        )
    merge = tower.spatial_merge_size
    made: list[Grid] = []
    for number, (t, h, w) in enumerate(grids.tolist()):
        if not 1 <= min(t, h, w) <= max(t, h, w) <= _LARGEST_SIDE or h % merge or w % merge:
            raise CheckpointError(
                f"{grid_name}[{number}] is {[t, h, w]}; each must lie in 1..{_LARGEST_SIDE}, height and width in "
                f"multiples of {merge}"
            )
        made.append((t, h, w))
    patches = sum(map(math.prod, made))
    if patches != len(pixels):
        raise CheckpointError(f"{pixels_name} has {len(pixels):,} patches; {grid_name} makes {patches:,}")
    with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite there
        if not np.isfinite(pixels.astype(np.float32, copy=False)).all():
            raise CheckpointError(f"{pixels_name} holds NaN or infinity, or a number too large for float32")
    return made


def _share_out(
    inputs: Inputs, kind: str, token: int, grids: list[Grid], tower: Any, shares: list[dict[str, Array]]
) -> None:
    """Give each row the images of its runs of ``token``. CheckpointError when runs and grids do not fit."""
    pixels_name, grid_name, _ = _KINDS[kind]
    merge, taken, patches = tower.spatial_merge_size, 0, 0
    pixels, all_grids = getattr(inputs, pixels_name), getattr(inputs, grid_name)
    apart = tower.frames_apart and kind == "video"
    for number, ids in enumerate(inputs.ids):
        first, first_patch = taken, patches
        runs = _runs(ids, token)
        for start, length in runs:
            if taken == len(grids):
                raise CheckpointError(
                    f"ids: row {number} has a run of {kind} tokens (id {token}) at position {start}, but "
                    + (f"{grid_name} has only {len(grids)} rows" if grids else f"there is no {grid_name}")
                )
            t, h, w = grids[taken]
            runs_of_it = [(start, length), *(next(runs, (len(ids), 0)) for _ in range(t - 1 if apart else 0))]
            wanted = (1 if apart else t) * h * w // merge**2
            for frame, (at, count) in enumerate(runs_of_it):
                if count != wanted:
                    what = f"frame {frame} of " if apart else ""
                    raise CheckpointError(
                        f"ids: row {number} has {count} {kind} tokens (id {token}) at position {at}; {what}"
                        f"{grid_name}[{taken}] = {[t, h, w]} makes {wanted} in a run"
                    )
            taken, patches = taken + 1, patches + t * h * w
        if taken > first:
            shares[number] |= {pixels_name: pixels[first_patch:patches], grid_name: all_grids[first:taken]}
    if taken < len(grids):
        raise CheckpointError(f"{grid_name} has {len(grids)} rows; the runs of {kind} tokens in ids take {taken}")


def _runs(ids: Array, token: int) -> Iterator[tuple[int, int]]:
    """Start and length of every run of ``token``."""
    at = 0
    for same, run in groupby((ids == token).tolist()):
        length = sum(1 for _ in run)
        if same:
            yield at, length
        at += length
