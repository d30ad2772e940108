"""Bugs that live in the image path alone: on plain text each of these models is right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models import prompt as prompts
from reference_models import rope
from reference_models.engine import CachePool, KVCache
from reference_models.mrope_decoder import MRopeDecoder
from reference_models.prompt import Prompt


def _offset_mask(original: Any) -> Any:
    def forward(self: Any, tokens: Any, caches: Any, mask_policy: str = "live", prompt: Any = None) -> Any:
        cached = isinstance(caches[0], KVCache)  # a forward without a cache has the masks that it was given
        return original(self, tokens, caches, "offset" if prompt is not None and cached else mask_policy, prompt)

    return forward


def _no_delta(original: Any) -> Any:
    def text_position_ids(offset: int, delta: int, batch: int, length: int) -> mx.array:
        ids: mx.array = original(offset, 0, batch, length)
        return ids

    return text_position_ids


def _text_ids_in_a_later_chunk(original: Any) -> Any:
    def lay_over(self: Prompt, offset: int, tokens: mx.array, embeddings: mx.array, position_ids: mx.array) -> Any:
        embeddings, ids, deepstack = original(self, offset, tokens, embeddings, position_ids)
        return embeddings, ids if offset == 0 else position_ids, deepstack

    return lay_over


def _keeps_its_delta(original: Any) -> Any:
    def cut(self: Prompt, length: int) -> Prompt:
        prompt: Prompt = original(self, length)
        return dataclasses.replace(prompt, rope_delta=self.rope_delta)

    return cut


def _is_not_cut(original: Any) -> Any:
    def cut(self: Prompt, length: int) -> Prompt:
        return self

    return cut


@contextmanager
def _one_delta_for_all() -> Iterator[None]:
    """The model remembers the delta of the prompt that it read last, and uses it for every sequence of the pool."""
    last = 0
    read, ids, new_pool = prompts.read, rope.text_position_ids, CachePool.__init__

    def read_and_remember(*given: Any, **named: Any) -> Prompt:
        nonlocal last
        prompt = read(*given, **named)
        last = prompt.rope_delta
        return prompt

    def forget(self: CachePool, *given: Any, **named: Any) -> None:
        nonlocal last
        last = 0
        new_pool(self, *given, **named)

    prompts.read = read_and_remember
    CachePool.__init__ = forget  # type: ignore[method-assign]
    rope.text_position_ids = lambda offset, delta, batch, length: ids(offset, last, batch, length)
    try:
        yield
    finally:
        prompts.read, rope.text_position_ids = read, ids
        CachePool.__init__ = new_pool  # type: ignore[method-assign]


IMAGE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "offset-mask-with-images-only",
        "behind a prompt with images the mask is sized by the offset, on plain text by the live length",
        "mask_key_axis_equals_live_keys",
        replacing(MRopeDecoder, "__call__", _offset_mask),
        source="lablup/mlxcel#420 (here behind images alone)",
        layer="mask",
    ),
    Fault(
        "rope-delta-forgotten",
        "text behind images is rotated at its offset, as if images used one id per token",
        "positions_are_absolute",
        replacing(rope, "text_position_ids", _no_delta),
        "Blaizzy/mlx-vlm#1527",
        layer="positions",
    ),
    Fault(
        "text-ids-in-a-later-chunk",
        "the part of an image that a later chunk brings gets the ids of text",
        "positions_are_absolute",
        replacing(Prompt, "lay_over", _text_ids_in_a_later_chunk),
        source="Blaizzy/mlx-vlm#1741 (ids were not sliced, later chunks got those of the first)",
        layer="positions",
    ),
    Fault(
        "rope-delta-survives-a-rollback",
        "a rollback into an image leaves the delta of the whole prompt",
        "positions_are_absolute",
        replacing(Prompt, "cut", _keeps_its_delta),
        source="jundot/omlx#3346 (position state of an earlier prompt was left over)",
        layer="positions",
    ),
    Fault(
        "prompt-survives-a-rollback",
        "after a rollback into the prompt its old tokens are still expected",
        "every_operation_completes",
        replacing(Prompt, "cut", _is_not_cut),
        "Blaizzy/mlx-vlm#756 (positions of an earlier prompt were used on)",
        layer="images",
    ),
    Fault(
        "one-rope-delta-for-all-sequences",
        "the delta is state of the model, not of the sequence",
        "positions_are_absolute",
        _one_delta_for_all,
        "Blaizzy/mlx-vlm#1143",
        layer="positions",
    ),
)
"""Each is found on the path with images by the property that it names, and cannot be found on the text path."""
