"""Bugs of masks that are as wide, or as aligned, as something else than the keys; and of positions beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import Patch, replacing
from reference_models import minicpm3, rope
from reference_models.engine import masks

_WIDTH = "mask_key_axis_equals_live_keys"
_CONTENT = "mask_shows_exactly_the_visible_set"
_POSITIONS = "positions_are_absolute"


def _before(count: Callable[[Any, int], int]) -> Callable[[], AbstractContextManager[None]]:
    """How many keys a mask believes to be held: ``count(cache, the right number)``."""

    def make(original: Any) -> Any:
        def key_axis_before(cache: Any, policy: Any) -> int:
            return count(cache, original(cache, policy))

        return key_axis_before

    return replacing(masks, "key_axis_before", make)


def _drawn(change: Callable[[mx.array, int, Any], mx.array]) -> Callable[[], AbstractContextManager[None]]:
    """Changes the mask of every chunk: ``change(mask [l, K], keys before the chunk, cache)``."""

    def make(original: Any) -> Any:
        def chunk_mask(l: int, cache: Any, policy: str = "live", window: int | None = None) -> mx.array | None:
            mask = original(l, cache, policy, window)
            return mask if mask is None or l == 1 else change(mask, mask.shape[-1] - l, cache)

        return chunk_mask

    return replacing(masks, "chunk_mask", make)


def _aligned_left(mask: mx.array, before: int, cache: Any) -> mx.array:
    """The triangle starts at the first key, as if nothing had been cached."""
    queries, keys = mask.shape
    return mx.arange(keys)[None] <= mx.arange(queries)[:, None]


def _without(hidden: Callable[[Any, int], bool], slot: int) -> Callable[[mx.array, int, Any], mx.array]:
    """Hides one slot where ``hidden(cache, keys before)``."""

    def change(mask: mx.array, before: int, cache: Any) -> mx.array:
        return mask & (mx.arange(mask.shape[-1]) != slot) if before and hidden(cache, before) else mask

    return change


def _between_chunks(mask: mx.array, before: int, cache: Any) -> mx.array:
    """Tokens of a chunk do not see one another, only what was cached and themselves."""
    queries, keys = mask.shape
    key = mx.arange(keys)[None]
    return mask & ((key < before) | (key == mx.arange(queries)[:, None] + before))


def _start(number: Callable[[int, int], int]) -> Callable[[], AbstractContextManager[None]]:
    """Where RoPE starts: ``number(offset, length)``, in both ways in which the families rotate."""

    def rotations(original: Any) -> Any:
        def rotate(x: mx.array, offset: int, *rest: Any, **named: Any) -> mx.array:
            rotated: mx.array = original(x, number(offset, x.shape[-2]), *rest, **named)
            return rotated

        return rotate

    def ids(original: Any) -> Any:
        def text_position_ids(offset: int, delta: int, batch: int, length: int) -> mx.array:
            made: mx.array = original(number(offset, length), delta, batch, length)
            return made

        return text_position_ids

    return _both(rotations, ids)


def _both(rotations: Patch, ids: Patch) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def plant() -> Iterator[None]:
        with replacing(rope, "rotate", rotations)(), replacing(rope, "text_position_ids", ids)():
            yield

    return plant


def _by_its_switch(original: Any) -> Any:
    """The model's own bug is switched on for the length of a forward."""

    def forward(self: Any, *given: Any, **named: Any) -> mx.array:
        right = self.rope_from
        self.rope_from = "live"
        try:
            out: mx.array = original(self, *given, **named)
        finally:
            self.rope_from = right
        return out

    return forward


def _has_the_switch(target: Any) -> bool:
    return isinstance(target.variant.config, minicpm3.Config)


def _first_alone(original: Any) -> Any:
    """Angles of one token broadcast over all of them without a word."""

    def text_position_ids(offset: int, delta: int, batch: int, length: int) -> mx.array:
        ids: mx.array = original(offset, delta, batch, length)
        return ids[..., :1] if offset and length > 1 else ids

    return text_position_ids


FAULTS: tuple[Fault, ...] = (
    Fault(
        "mask-from-offset",
        "the mask is sized by the offset, which a front trim does not lower",
        _WIDTH,
        _before(lambda cache, right: cache.offset),
        "lablup/mlxcel#420",
        layer="mask",
    ),
    Fault(
        "mask-from-buffer-width",
        "the mask is as wide as the buffer, not as the keys in it",
        _WIDTH,
        _before(lambda cache, right: int(getattr(cache, "capacity", right))),  # without buffers it has no width
        "lablup/mlxcel#1776 (a mask sized by the physical length of a cache)",
        layer="mask",
    ),
    Fault(
        "mask-forgets-the-cache",
        "the mask of a chunk is square: it does not know that keys are cached",
        _WIDTH,
        _before(lambda cache, right: 0),
        "huggingface/candle#3743",
        layer="mask",
    ),
    Fault(
        "mask-one-key-narrow",
        "behind cached keys the mask is one key too narrow",
        _WIDTH,
        _before(lambda cache, right: max(0, right - 1)),
        source="huggingface/transformers#48510 (a mask narrower than the keys, one past the window)",
        layer="mask",
    ),
    Fault(
        "mask-starts-at-the-first-key",
        "the triangle is aligned with the first key instead of the last",
        _CONTENT,
        _drawn(_aligned_left),
        source="pytorch/pytorch#144858",
        layer="mask",
    ),
    Fault(
        "mask-hides-the-oldest-key-after-a-trim",
        "after a front trim the oldest key that was kept is hidden",
        _CONTENT,
        _drawn(_without(lambda cache, before: cache.live_start > 0, 0)),
        source="huggingface/transformers#37414 (where the keys of a mask start was one off)",
        layer="mask",
    ),
    Fault(
        "mask-hides-tokens-of-the-same-chunk",
        "tokens of a chunk see the cache and themselves, not one another",
        _CONTENT,
        _drawn(_between_chunks),
        layer="mask",
    ),
    Fault(
        "rotates-every-chunk-from-zero",
        "RoPE starts at 0 in every forward",
        _POSITIONS,
        _start(lambda offset, length: 0),
        source="RobertCsordas/moeut#6",
        layer="positions",
    ),
    Fault(
        "rotates-behind-the-chunk",
        "RoPE starts where the chunk ends",
        _POSITIONS,
        _start(lambda offset, length: offset + length),
        source="ml-explore/mlx-lm#1702 (KV-shared layers rotated at offset + L)",
        layer="positions",
    ),
    Fault(
        "rotates-at-live-length-by-a-switch",
        "the model's own switch makes it rotate at the number of keys held; its masks are right",
        _POSITIONS,
        replacing(minicpm3.Model, "__call__", _by_its_switch),
        source="rajveer43/VeloxQuant-MLX#195 (the offset told the rows kept)",
        shown_on=_has_the_switch,
        layer="positions",
    ),
    Fault(
        "one-position-for-a-whole-chunk",
        "behind cached keys all tokens of a chunk get the position of its first",
        _POSITIONS,
        replacing(rope, "text_position_ids", _first_alone),
        source="jundot/omlx#2363",
        shown_on=lambda target: bool(target.turns_by_mrope),
        layer="positions",
    ),
    Fault(
        "rotates-a-single-token-one-behind",
        "a decode step uses the position of the token before it",
        _POSITIONS,
        _start(lambda offset, length: offset - 1 if length == 1 and offset else offset),
        "Blaizzy/mlx-vlm#1527 (decode steps lost the state that prefill had made for positions)",
        layer="positions",
    ),
)
