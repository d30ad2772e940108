"""What a sequence with images needs after the images were looked at once.

``read`` runs the vision tower and scatters its features among the token embeddings; the ``Prompt`` that comes out
serves every forward of the sequence, whatever the chunks. All its rows stand at absolute positions, so a front trim or
a rollback of the cache changes nothing in it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from reference_models import mrope_ids, vision

GridTHW = mx.array | Sequence[Sequence[int]]


@dataclass(frozen=True, eq=False)
class Images:
    """Images and videos as the published processors hand them over, each ordered as in the tokens.

    ``pixel_values``, ``pixel_values_videos``: flattened patches ``[patches, channels * temporal * patch * patch]``;
    ``image_grid_thw``, ``video_grid_thw``: ``[n, 3]``. Raises ValueError for pixels without grids or grids without
    pixels.
    """

    pixel_values: mx.array | None = None
    image_grid_thw: GridTHW | None = None
    pixel_values_videos: mx.array | None = None
    video_grid_thw: GridTHW | None = None

    def __post_init__(self) -> None:
        for pixels, grids, name in (
            (self.pixel_values, self.image_grid_thw, "image_grid_thw"),
            (self.pixel_values_videos, self.video_grid_thw, "video_grid_thw"),
        ):
            if (pixels is None) != (grids is None):
                raise ValueError(f"{name} and its pixel values come together or not at all")


@dataclass(frozen=True, eq=False)
class Prompt:
    """``tokens [1, S]`` as the model reads them.

    ``embeddings [1, S, hidden]``: of the tokens, features in place of placeholders; ``position_ids`` int32
    ``[3, 1, S]``; ``rope_delta``: ids behind the prompt are ``offset + rope_delta``; ``deepstack``: per text layer from
    the first on, ``[1, S, hidden]`` to be added to its output, 0 where there is text.
    """

    tokens: mx.array
    embeddings: mx.array
    position_ids: mx.array
    rope_delta: int
    deepstack: tuple[mx.array, ...] = ()

    @property
    def length(self) -> int:
        """S, in tokens."""
        return self.tokens.shape[1]

    def cut(self, length: int) -> "Prompt":
        """The first ``length`` tokens as a prompt of their own, for other tokens to follow after a rollback into it.

        Raises ValueError unless ``1 <= length <= S``.
        """
        if not 1 <= length <= self.length:
            raise ValueError(f"a prompt of {self.length} tokens cannot be cut to {length}")
        ids = self.position_ids[..., :length]
        places: list[mrope_ids.Place] = ids[:, 0].T.tolist()  # type: ignore[assignment]
        return replace(
            self,
            tokens=self.tokens[:, :length],
            embeddings=self.embeddings[:, :length],
            position_ids=ids,
            rope_delta=mrope_ids.rope_delta(places),
            deepstack=tuple(rows[:, :length] for rows in self.deepstack),
        )

    def lay_over(
        self, offset: int, tokens: mx.array, embeddings: mx.array, position_ids: mx.array
    ) -> tuple[mx.array, mx.array, tuple[mx.array, ...]]:
        """A chunk ``tokens [1, L]`` at ``offset`` with what the prompt knows of it.

        ``embeddings [1, L, hidden]`` and ``position_ids [3, 1, L]`` are those of text; positions inside the prompt get
        the prompt's own. The third result is DeepStack's ``[1, L, hidden]`` per layer, empty when the chunk lies behind
        the prompt. Raises ValueError for a batch, and for tokens that are not those of the prompt: they would be
        ignored (see ``cut``).
        """
        if tokens.shape[0] != 1:
            raise ValueError(f"a prompt belongs to one sequence, not to a batch of {tokens.shape[0]}")
        inside = min(max(self.length - offset, 0), tokens.shape[1])
        if not inside:
            return embeddings, position_ids, ()
        rows = slice(offset, offset + inside)
        if not mx.array_equal(tokens[:, :inside], self.tokens[:, rows]).item():
            raise ValueError(
                f"the tokens at positions {offset}..{offset + inside - 1} are not those that were read; cut the prompt "
                "where others begin"
            )
        behind = embeddings[:, inside:]
        return (
            mx.concatenate([self.embeddings[:, rows], behind], axis=1),
            mx.concatenate([self.position_ids[..., rows], position_ids[..., inside:]], axis=-1),
            tuple(mx.concatenate([layer[:, rows], mx.zeros_like(behind)], axis=1) for layer in self.deepstack),
        )


def read(
    tokens: mx.array,
    images: Images | None,
    *,
    embed: Callable[[mx.array], mx.array],
    tower: Any,
    config: Any,
) -> Prompt:
    """Look at ``images`` once and join them with ``tokens [1, S]``.

    ``tower``: a ``Tower`` of ``qwen2_vision`` or ``qwen3_vision``, or None for a model of text alone; ``config``: of
    the family, read are the token ids of the placeholders. Raises ValueError when tokens, grids and pixels do not fit.
    """
    if tokens.ndim != 2 or tokens.shape[0] != 1 or not tokens.shape[1]:
        raise ValueError(f"a prompt is one sequence [1, S] with S > 0, not {list(tokens.shape)}")
    if tower is None:
        if images is not None:
            raise ValueError("this model was built without a vision tower: set vision in its config")
        count = tokens.shape[1]
        ids = mx.broadcast_to(mx.arange(count, dtype=mx.int32), (3, 1, count))
        return Prompt(tokens, embed(tokens), ids, 0)
    images = images or Images()
    merge = tower.config.spatial_merge_size
    image_grids = vision.as_grids(images.image_grid_thw if images.image_grid_thw is not None else (), merge)
    video_grids = vision.as_grids(images.video_grid_thw if images.video_grid_thw is not None else (), merge)
    placeholders = mrope_ids.Placeholders(config.image_token_id, config.video_token_id, merge, tower.frames_apart)
    ids_of: list[int] = tokens[0].tolist()  # type: ignore[assignment]
    position_ids, rope_delta = mrope_ids.position_ids(ids_of, image_grids, video_grids, placeholders)

    embeddings = embed(tokens)
    deepstack: tuple[mx.array, ...] = ()
    for token, pixels, grids in (
        (config.image_token_id, images.pixel_values, image_grids),
        (config.video_token_id, images.pixel_values_videos, video_grids),
    ):
        if pixels is None or not grids:
            continue
        where = mx.array([at for at, each in enumerate(ids_of) if each == token])
        features = tower(pixels, grids)
        deepstack = deepstack or tuple(mx.zeros_like(embeddings) for _ in features.deepstack)
        embeddings = _scattered(embeddings, where, features.merged)
        deepstack = tuple(map(_scattered, deepstack, (where,) * len(deepstack), features.deepstack))
    prompt = Prompt(tokens, embeddings, position_ids, rope_delta, deepstack)
    mx.eval(prompt.embeddings, prompt.position_ids, prompt.deepstack)
    return prompt


def _scattered(rows: mx.array, where: mx.array, features: mx.array) -> mx.array:
    """``rows [1, S, hidden]`` with ``features [N, hidden]`` at positions ``where [N]``; the input stays as it is."""
    out = mx.array(rows)
    out[0, where] = features.astype(rows.dtype)
    return out
