"""A session on a model of mlx-vlm: the library reads the prompt, with its images, and its language half is called as
its own generation calls it.

A prompt is read whole by ``get_input_embeddings``. What follows depends on how many sequences there are, since a model
object keeps the RoPE delta of one.

* One: as ``generate_step``. Chunks of the prompt are given all that came of reading it, and the model takes its part;
  behind the prompt come tokens alone, so that all rests on what the model object has kept. A prompt of text ends with
  the last chunk of several tokens.
* Several: as ``BatchGenerator``, by whose functions the rows of a forward get their part of what was read, padded at
  the right; behind its prompt every row is given its own delta.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import numpy as np

from harness.operations import Owner
from harness.rules import QuantisedStorage
from harness.target import CopyObservation, ForwardObservation, PromptInput, RemovalObservation
from harness.targets import mlx_lm_caches as held
from harness.targets.mlx_lm_session import Library, LibrarySession
from harness.targets.mlx_vlm_models import Caches, batching, probe


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


Span = tuple[Reading, int, int]
"""A prompt, from which token on a forward takes of it, and how many."""


def joined(rows: Sequence[Span]) -> dict[str, Any]:
    """What a forward of several rows is given, each with its part of a prompt, padded at the right: as
    ``BatchGenerator`` joins those of prompts whose beginnings are cached (``_build_mixed_prompt_batch``)."""
    library, longest = batching(), max(count for _, _, count in rows)
    embeddings = [
        mx.pad(reading.embeddings[:, start : start + count], [(0, 0), (0, longest - count), (0, 0)])
        for reading, start, count in rows
    ]
    once: dict[str, Any] = {}
    by_row: dict[str, list[mx.array]] = {}
    for number, (reading, start, count) in enumerate(rows):
        for name, value in reading.given.items():
            if not isinstance(value, mx.array) or library._prompt_kwarg_batch_size(name, value) < 1:
                once.setdefault(name, value)
                continue
            mine = library._prompt_kwarg_row(name, value, number, len(rows))
            if library._is_sequence_aligned_prompt_kwarg(name, mine, len(reading.tokens)):
                mine = library._slice_sequence_aligned_prompt_kwarg(name, mine, start=start, stop=start + count)
                mine = library._pad_sequence_aligned_prompt_kwarg(name, mine, longest, left=False)
            by_row.setdefault(name, []).append(mine)
    together = {name: library._concat_prompt_kwarg_rows(name, values) for name, values in by_row.items()}
    return {"inputs_embeds": mx.concatenate(embeddings), **once, **together}


def forget(language_model: Any) -> None:
    """Take from a model what it has kept of sequences, as if it had just been loaded: a program must show the same
    whatever ran before it. What one sequence leaves to the next shows within a program, behind a Reset."""
    for name in ("_rope_deltas", "_position_ids"):
        if hasattr(language_model, name):
            setattr(language_model, name, None)


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
        forget(model.language_model)

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        try:  # outside the probe: the attention of a vision tower is not that of the cache
            self._language.given = self._given(sequence, tokens, prompt)
        except Exception as failure:  # whatever a model raises is an observation, and the judges decide
            return ForwardObservation(tuple(tokens), None, error=f"{type(failure).__name__}: {failure}")
        return super().forward(sequence, tokens)

    def _reading(self, sequence: int, offset: int, tokens: Sequence[int], prompt: PromptInput | None) -> Reading:
        """Of what a sequence has been told and is told now, all that is its prompt."""
        reading, end = self._readings[sequence], offset + len(tokens)
        if prompt is not None:
            reading = read_images(self._whole, prompt)
        if offset == 0 and prompt is None:
            reading = read(self._whole, tokens)
        assert reading is not None
        longer = offset < len(reading.tokens) < end  # than it was said to be
        if longer or self._is_more_text(reading, offset, len(tokens)):
            reading = read(self._whole, (*reading.tokens[:offset], *tokens), reading.pixels, reading.media)
        self._readings[sequence] = reading
        return reading

    def _is_more_text(self, reading: Reading, offset: int, count: int) -> bool:
        """Is a chunk the next one of a prompt of text? ``generate_step`` reads that whole, too, and gives every chunk
        the ids of all. A single token behind a prompt is the first that was generated, and ends it."""
        return self._alone and offset == len(reading.tokens) and count > 1 and not reading.media

    def _given(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None) -> dict[str, Any]:
        """Beside the tokens of the next forward of a sequence by itself."""
        offset = self.lengths(sequence)[0].offset
        reading = self._reading(sequence, offset, tokens, prompt)
        knows, self._model_knows = self._model_knows, True
        if offset >= len(reading.tokens):
            return {} if self._alone and knows else reading.delta
        if self._alone:
            return {"inputs_embeds": reading.embeddings[:, offset : offset + len(tokens)], **reading.given}
        return joined([(reading, offset, len(tokens))])

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        try:
            self._language.given = self._given_to_rows(tokens)
        except Exception as failure:  # as in forward
            error = f"{type(failure).__name__}: {failure}"
            return tuple(ForwardObservation(tuple(row), None, error=error) for row in tokens)
        return super().forward_batch(tokens)

    def _given_to_rows(self, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
        rows: list[Span] = []
        for row, new in zip(self._rows, tokens, strict=True):
            offset = self.lengths(row)[0].offset
            rows.append((self._reading(row, offset, new, None), offset, len(new)))
        if any(offset < len(reading.tokens) for reading, offset, _ in rows):
            return joined([self._as_a_prompt(row, new) for row, new in zip(rows, tokens, strict=True)])
        deltas = [reading.delta for reading, _, _ in rows]
        return {name: mx.concatenate([delta[name] for delta in deltas]) for name in deltas[0]}

    def _as_a_prompt(self, row: Span, tokens: Sequence[int]) -> Span:
        """A row that is behind its prompt, as if its tokens were one: with the ids that its delta makes."""
        reading, offset, count = row
        if offset < len(reading.tokens):
            return row
        text = read(self._whole, tokens)
        delta = reading.delta.get("rope_deltas")
        ids = {} if delta is None else {"position_ids": text.given["position_ids"] + (offset + delta)}
        return Reading(text.tokens, text.embeddings, {**text.given, **ids, **reading.delta}), 0, count

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

    def quantise(self, sequence: int, storage: QuantisedStorage) -> CopyObservation:
        raise NotImplementedError("quantised caches of mlx-vlm are not judged")
