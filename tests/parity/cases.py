"""What is compared: a drawn configuration, a drawn prompt, and how our side cuts it into chunks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reference_models import registry
from reference_models.drawing import VISION_FAMILIES, Choose, draw_config
from reference_models.vision import Grid

MODALITIES = ("text", "image", "images", "video", "mixed")
#: Of a modality: the images and videos of a prompt, in order.
KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "text": ((),),
    "image": (("image",),),
    "images": (("image", "image"), ("image", "image", "image")),
    "video": (("video",), ("video", "video")),
    "mixed": (("image", "video"), ("video", "image"), ("video", "image", "image")),
}
MOST_TEXT = 24  # tokens; three times the context after which Mistral 4's query scale moves, and more


@dataclass(frozen=True)
class Picture:
    """An image or a video: its kind and its grid, in patches."""

    kind: str
    grid: Grid


@dataclass(frozen=True, eq=False)
class Case:
    """One comparison. ``tokens``: the prompt; ``pictures`` in its order; ``chunk``: how many tokens our side takes at
    once when it does not take all; ``options``: of our Model; ``seed``: of weights and pixels; ``bare``: a picture
    stands in the prompt without the tokens that publishers put around it."""

    family: str
    modality: str
    config: Any
    options: dict[str, str]
    tokens: tuple[int, ...]
    pictures: tuple[Picture, ...]
    chunk: int
    bare: bool
    seed: int

    def grids(self, kind: str) -> list[Grid]:
        """Grids of the images, or of the videos, in order."""
        return [picture.grid for picture in self.pictures if picture.kind == kind]

    def pixels(self, kind: str) -> np.ndarray | None:
        """Flattened patches float32 ``[patches, patch_pixels]`` of the images, or of the videos; None without any."""
        patches = sum(map(math.prod, self.grids(kind)))
        if not patches:
            return None
        rng = np.random.default_rng([self.seed, kind == "video"])
        return rng.standard_normal((patches, self.config.vision.patch_pixels)).astype(np.float32)

    def text(self) -> str:
        """The case in one line, for a failure."""
        pictures = ", ".join(f"{picture.kind} {picture.grid}" for picture in self.pictures)
        chosen = "".join(f", {key}={value}" for key, value in self.options.items())
        around = ", bare" if self.bare else ""
        return (
            f"{self.config}{chosen}; {len(self.tokens)} tokens{around}{', ' + pictures if pictures else ''}; "
            f"chunks of {self.chunk}; seed {self.seed}"
        )


def special_tokens(config: Any) -> dict[str, int]:
    """Ids that no text token of a prompt has; ``drawing`` leaves the end of the vocabulary to them."""
    last = config.vocab_size - 1
    named = {"vision_start_token_id": last - 1, "vision_end_token_id": last}
    if hasattr(config, "image_token_id"):
        named |= {"image_token_id": config.image_token_id, "video_token_id": config.video_token_id}
    return named


def modalities(family: str) -> tuple[str, ...]:
    """What a family can be given."""
    return MODALITIES if family in VISION_FAMILIES else ("text",)


def draw_case(family: str, modality: str, choose: Choose) -> Case:
    """A case of that family and modality, simplest first; see ``drawing.draw_config`` for ``choose``."""
    config = draw_config(family, choose, images=modality != "text", windows=True)
    options = dict(choose(registry.OPTIONS.get(family, ({},))))
    seed = choose(range(1 << 12))
    rng = np.random.default_rng([seed, 2])
    kinds = choose(KINDS[modality])
    bare = bool(kinds) and choose((False, False, True))
    tokens: list[int] = []
    pictures = []
    words = config.vocab_size - 4
    for kind in kinds:
        tokens += rng.integers(0, words, choose((2, 0, 5))).tolist()
        picture = _picture(kind, config, choose)
        pictures.append(picture)
        _put(tokens, picture, family, config, bare, rng)
    longest = MOST_TEXT if not kinds else 6
    tokens += rng.integers(0, words, choose(range(0 if kinds else 1, longest + 1))).tolist()
    return Case(
        family=family,
        modality=modality,
        config=config,
        options=options,
        tokens=tuple(tokens),
        pictures=tuple(pictures),
        chunk=choose((3, 1, 2, 7)),
        bare=bare,
        seed=seed,
    )


def _picture(kind: str, config: Any, choose: Choose) -> Picture:
    merge = config.vision.spatial_merge_size
    frames = choose((2, 1, 3, 5)) if kind == "video" else 1
    return Picture(kind, (frames, choose((1, 2, 3)) * merge, choose((1, 2, 3)) * merge))


def _put(tokens: list[int], picture: Picture, family: str, config: Any, bare: bool, rng: np.random.Generator) -> None:
    """The tokens of one picture; qwen3's videos have a run for every frame, behind a timestamp in words."""
    named = special_tokens(config)
    token = named[f"{picture.kind}_token_id"]
    frames, height, width = picture.grid
    runs = frames if picture.kind == "video" and family != "qwen2_vl" else 1
    count = frames * height * width // config.vision.spatial_merge_size**2 // runs
    for run in range(runs):
        if run or (tokens and tokens[-1] == token):  # two runs need a token between them
            tokens += rng.integers(0, config.vocab_size - 4, 2).tolist()
        if bare:
            tokens += [token] * count
        else:
            tokens += [named["vision_start_token_id"], *[token] * count, named["vision_end_token_id"]]


def chunks(case: Case) -> Sequence[int]:
    """Lengths of the forwards of our chunked side."""
    whole, rest = divmod(len(case.tokens), case.chunk)
    return [case.chunk] * whole + [rest] * bool(rest)
