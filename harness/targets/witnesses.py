"""What the two witnesses of the reference target say of a History: float64 NumPy, and the model without a cache."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from harness.oracle import Expected, History
from harness.rules import CacheRule
from harness.target import PromptInput
from reference_models import witness
from reference_models.engine import NoCache
from reference_models.prompt import Images, Prompt
from reference_models.registry import Variant

_Array = np.ndarray[Any, Any]


def images_of(prompt: PromptInput) -> Images:
    """The images of a prompt with arrays of MLX."""
    pixels, grids, frames, videos = (
        None if array is None else mx.array(array)
        for array in (
            prompt.pixel_values,
            prompt.image_grid_thw,
            prompt.pixel_values_videos,
            prompt.video_grid_thw,
        )
    )
    return Images(pixels, grids, frames, videos)


class Witnesses:
    """Of one built model, with caches of these rules (of every attention layer, a layer's window deciding which)."""

    def __init__(self, variant: Variant, model: Any, rules: Sequence[CacheRule | None]) -> None:
        self._variant, self._model = variant, model
        self._windows: tuple[int | None, ...] = getattr(model, "windows", (None,) * len(model.attention_layers))
        self._rules = dict(zip(self._windows, rules, strict=True))
        self._mrope = hasattr(model, "read")

    @functools.cached_property
    def _weights(self) -> dict[str, _Array]:
        leaves: Any = tree_flatten(self._model.parameters())
        return {name: np.array(array.astype(mx.float32)).astype(np.float64) for name, array in leaves}

    def float64(self, history: History) -> Expected:
        """``reference_models.witness``, with the weights of the model; only the features of images are the model's."""
        config = self._variant.config
        shown = {window: history.shown(window, rule) for window, rule in self._rules.items()}
        given = witness.Sequence(
            tokens=history.tokens,
            positions=history.places if self._mrope else history.positions,
            visible=tuple(shown[window] for window in self._windows),
            cache_form=self._variant.options.get("cache_form", "latent"),
            itself=history.itself,
            **self._features(history),
        )
        said = witness.forward(self._variant.family, config, self._weights, given, history.storages)
        return Expected(said.logits, said.gaps.choice, said.gaps.rounding)

    def _features(self, history: History) -> dict[str, Any]:
        """What the tower makes of every image, at the tokens that stand for it: those of a prompt, in order."""
        if not history.prompts:
            return {}
        config, tower = self._variant.config, self._model.visual
        count = len(history.tokens)
        features = np.zeros((count, config.hidden_size))
        deepstack: list[_Array] = []
        is_feature = np.zeros(count, bool)
        for number, prompt in enumerate(history.prompts):
            images, tokens = images_of(prompt), np.asarray(prompt.tokens)
            rows = np.flatnonzero(history.prompt_of == number)
            for token, pixels, grids in (
                (config.image_token_id, images.pixel_values, prompt.image_grid_thw),
                (config.video_token_id, images.pixel_values_videos, prompt.video_grid_thw),
            ):
                if pixels is None or grids is None:
                    continue
                made = tower(pixels, [tuple(int(side) for side in grid) for grid in grids])
                rank = np.cumsum(tokens == token) - 1  # of each position: the how-manieth of its kind
                here = rows[history.tokens[rows] == token]
                which = rank[history.positions[here]]
                is_feature[here] = True
                features[here] = np.array(made.merged.astype(mx.float32))[which]
                deepstack = deepstack or [np.zeros_like(features) for _ in made.deepstack]
                for layer, added in zip(deepstack, made.deepstack, strict=True):
                    layer[here] = np.array(added.astype(mx.float32))[which]
        return {"is_feature": is_feature, "features": features, "deepstack": tuple(deepstack)}

    def cache_free(self, history: History) -> Expected:
        """The model itself, over all tokens at once: its masks given, nothing kept."""
        model = self._model
        tokens = mx.array(history.tokens[None].astype(np.int32))
        masks = {window: mx.array(history.shown(window, rule)) for window, rule in self._rules.items()}
        offset = 0 if self._mrope else mx.array(history.positions.astype(np.int32))
        caches = [NoCache(offset, cast(Any, history.storages.tolist())) for _ in self._windows]
        read = {"prompt": self._prompt(history, tokens)} if self._mrope else {}
        logits = model(tokens, cast(Any, caches), masks, **read)[0]
        return Expected(np.array(logits.astype(mx.float32)))

    def _prompt(self, history: History, tokens: mx.array) -> Prompt:
        """All tokens as one prompt: M-RoPE ids from the ledger, and at each token of a prompt with images the row that
        the model read for its position."""
        embeddings = self._model.model.embed_tokens(tokens)
        deepstack: tuple[mx.array, ...] = ()
        for number, prompt in enumerate(history.prompts):
            read = self._model.read(mx.array([prompt.tokens], mx.int32), images_of(prompt))
            rows = np.flatnonzero(history.prompt_of == number)
            where, at = mx.array(rows), mx.array(history.positions[rows])
            embeddings = _put(embeddings, where, read.embeddings[0, at])
            deepstack = deepstack or tuple(mx.zeros_like(embeddings) for _ in read.deepstack)
            deepstack = tuple(
                _put(layer, where, added[0, at]) for layer, added in zip(deepstack, read.deepstack, strict=True)
            )
        places = mx.array(history.places[:, None].astype(np.int32))
        return Prompt(tokens, embeddings, places, 0, deepstack)


def _put(rows: mx.array, where: mx.array, new: mx.array) -> mx.array:
    """``rows [1, S, hidden]`` with ``new [N, hidden]`` at ``where``; the input stays as it is."""
    out = mx.array(rows)
    out[0, where] = new
    return out
