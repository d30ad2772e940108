"""A session on a model of mlx-vlm: the library reads the prompt, with its images, and its language half is called as
its own generation calls it.

A prompt is read whole by ``get_input_embeddings``, and its chunks are given what came of it, position ids and all, as
``generate_step`` does. Behind the prompt a pool of one sequence gives tokens alone, as ``generate_step`` does too, so
that all rests on what the model object has kept. Where several sequences share a model nothing can be kept there, and
each is given its own RoPE delta, as ``GenerationBatch`` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np

from harness.operations import Owner
from harness.target import CopyObservation, ForwardObservation, PromptInput, RemovalObservation
from harness.targets import mlx_lm_caches as held
from harness.targets.mlx_lm_session import Library, LibrarySession
from harness.targets.mlx_vlm_models import Caches, probe


@dataclass(frozen=True, eq=False)
class Reading:
    """A prompt as the library has read it. ``tokens``: all of it; ``embeddings`` [1, length, hidden]; ``given``: what
    its chunks are given beside them; ``pixels``, ``media``: what was looked at, to read a longer prompt."""

    tokens: tuple[int, ...]
    embeddings: mx.array
    given: dict[str, Any]
    pixels: mx.array | None = None
    media: dict[str, mx.array] = field(default_factory=dict)

    @property
    def delta(self) -> dict[str, mx.array]:
        """What is added to a position behind the prompt, int [1, 1]; nothing from a model without M-RoPE."""
        return {name: self.given[name] for name in ("rope_deltas",) if name in self.given}

    def cut(self, length: int) -> Reading:
        """As if the prompt had ended there. The delta follows by its definition from the ids that the library gave."""
        given = dict(self.given)
        if "rope_deltas" in given:
            ids = np.array(given["position_ids"])[..., :length]
            given |= {"position_ids": mx.array(ids), "rope_deltas": mx.array([[int(ids.max()) + 1 - length]])}
        return Reading(self.tokens[:length], self.embeddings[:, :length], given, self.pixels, self.media)


def read(model: Any, tokens: Sequence[int], pixels: mx.array | None = None, media: Any = None) -> Reading:
    """A prompt, as ``generate_step`` has it read."""
    media = media or {}
    features = model.get_input_embeddings(mx.array([list(tokens)]), pixels, mask=None, **media)
    given = {name: value for name, value in features.to_dict().items() if value is not None}
    embeddings = given.pop("inputs_embeds")
    return Reading(tuple(tokens), embeddings, {**media, **given}, pixels, media)


def read_images(model: Any, prompt: PromptInput) -> Reading:
    """A prompt with images or videos."""
    named = ("image_grid_thw", "pixel_values_videos", "video_grid_thw")
    media = {name: mx.array(array) for name in named if (array := getattr(prompt, name)) is not None}
    pixels = None if prompt.pixel_values is None else mx.array(prompt.pixel_values)
    return read(model, prompt.tokens, pixels, media)


class _LanguageModel:
    """The language half of a model, called with what the next forward is given."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.given: dict[str, Any] = {}

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        given, self.given = self.given, {}
        logits: mx.array = self.model(ids, cache=cache, **given).logits
        return logits


class VisionSession(LibrarySession):
    """Caches of the library, and beside them of every sequence how its prompt was read."""

    def __init__(self, model: Any, calls: Sequence[int], owners: tuple[Owner, ...]) -> None:
        self._whole, self._language = model, _LanguageModel(model.language_model)
        super().__init__(self._language, cast(Library, Caches(model.language_model)), calls, owners)
        self._probe = probe()
        self._readings: list[Reading | None] = [None] * len(owners)
        self._kept: dict[int, Reading | None] = {}
        self._alone, self._model_knows = len(owners) == 1, False

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        try:  # outside the probe: the attention of a vision tower is not that of the cache
            self._language.given = self._given(sequence, tokens, prompt)
        except Exception as failure:  # whatever a model raises is an observation, and the judges decide
            return ForwardObservation(tuple(tokens), None, error=f"{type(failure).__name__}: {failure}")
        return super().forward(sequence, tokens)

    def _given(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None) -> dict[str, Any]:
        """Beside the tokens of the next forward of a sequence."""
        offset, reading = self.lengths(sequence)[0].offset, self._readings[sequence]
        end = offset + len(tokens)
        if prompt is not None:
            reading = read_images(self._whole, prompt)
        if offset == 0 and prompt is None:
            reading = read(self._whole, tokens)
        assert reading is not None
        if offset < len(reading.tokens) < end:  # the prompt turns out to be longer
            reading = read(self._whole, (*reading.tokens[:offset], *tokens), reading.pixels, reading.media)
        self._readings[sequence] = reading
        if end <= len(reading.tokens):
            self._model_knows = True
            return {"inputs_embeds": reading.embeddings[:, offset:end], **reading.given}
        if self._alone and self._model_knows:
            return {}
        self._model_knows = True
        return reading.delta

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        """Every row is given its delta; one without a prompt reads its tokens as text, whose delta is 0."""
        for row, new in zip(self._rows, tokens, strict=True):
            if self._readings[row] is None:
                self._readings[row] = read(self._whole, new)
        deltas = [reading.delta for row in self._rows if (reading := self._readings[row]) is not None]
        self._language.given = {name: mx.concatenate([delta[name] for delta in deltas]) for name in deltas[0]}
        return super().forward_batch(tokens)

    def _trimmed(self, caches: list[Any], n: int) -> RemovalObservation:
        """By the ``trim`` of every cache, as the library goes back to a prefix."""
        if not all(cache.is_trimmable() for cache in caches):
            return RemovalObservation(refused="is_trimmable says no")
        removed = [cache.trim(n) for cache in caches]
        places = [place for place, _ in held.leaves(caches)]
        return RemovalObservation(tuple(removed[places[at]] for at in self._calls))

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        seen = super().rollback(sequence, n)
        reading = self._readings[sequence]
        if seen.error is None and any(seen.removed) and reading is not None:
            offset = self.lengths(sequence)[0].offset
            if offset < len(reading.tokens):
                self._put(sequence, reading.cut(offset) if offset else None)
        return seen

    def _put(self, sequence: int, reading: Reading | None) -> None:
        self._readings[sequence], self._model_knows = reading, False

    def snapshot(self, sequence: int, slot: int) -> CopyObservation:
        self._kept[slot] = self._readings[sequence]
        return super().snapshot(sequence, slot)

    def restore(self, sequence: int, slot: int) -> CopyObservation:
        if slot in self._slots:
            self._put(sequence, self._kept[slot])
        return super().restore(sequence, slot)

    def fork(self, sequence: int, into: int) -> CopyObservation:
        self._put(into, self._readings[sequence])
        return super().fork(sequence, into)

    def reset(self, sequence: int) -> CopyObservation:
        self._put(sequence, None)
        return super().reset(sequence)

    # As in LibrarySession: never called, since no target says that it can.

    def save_and_load(self, sequence: int) -> CopyObservation:
        raise NotImplementedError("mlx-vlm has no function that writes caches to a file")
