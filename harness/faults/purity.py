"""Bugs of those who write into arrays that are not theirs, and others who write into copies of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import mlx.core as mx
from mlx import nn

from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from reference_models import qwen2_vision, qwen3_vision
from reference_models.engine import BatchKVCache, BatchPool, KVCache
from reference_models.engine.batch_rows import BatchLengths
from reference_models.engine.side import Side
from reference_models.prompt import Prompt

_PURE = "operations_are_pure"
_CALLER = "huggingface/transformers#47741 (sixteen models wrote into tensors of their callers)"

Plant = Callable[[], AbstractContextManager[None]]


def _embeds(writes: Callable[[mx.array], None]) -> Plant:
    """``writes`` to the tokens once they have been looked up."""

    def make(original: Any) -> Any:
        def embed(self: Any, tokens: mx.array) -> mx.array:
            out: mx.array = original(self, tokens)
            writes(tokens)
            return out

        return embed

    return replacing(nn.Embedding, "__call__", make)


def _clears(tokens: mx.array) -> None:
    tokens[...] = -1


def _clears_a_copy(tokens: mx.array) -> None:
    _clears(mx.array(tokens))


def _attends(writes: Callable[[mx.array], None]) -> Plant:
    """``writes`` to the mask that attention was given."""

    def make(original: Any) -> Any:
        def attention(*given: Any, **named: Any) -> mx.array:
            out: mx.array = original(*given, **named)
            if isinstance(mask := named.get("mask"), mx.array):
                writes(mask)
            return out

        return attention

    return replacing(mx.fast, "scaled_dot_product_attention", make)


def _hides_the_oldest(mask: mx.array) -> None:
    mask[..., 0] = False if mask.dtype == mx.bool_ else -mx.inf


def _hides_in_a_copy(mask: mx.array) -> None:
    _hides_the_oldest(mx.array(mask))


def _writes_back(mask: mx.array) -> None:
    mask[...] = mx.array(mask)


def _one_offset(original: property) -> property:
    """The same array for ever, with the numbers of today: ``offset += n`` where others hold it."""

    def offset(self: BatchLengths) -> mx.array:
        now: mx.array = original.fget(self)  # type: ignore[misc]
        kept: mx.array | None = vars(self).get("_given_offset")
        if kept is None or kept.shape != now.shape:
            self._given_offset = kept = now  # type: ignore[attr-defined]
        else:
            kept += now - kept
        return kept

    return property(offset)


def _advances(original: Any) -> Any:
    def update_and_fetch(self: BatchKVCache, keys: mx.array, values: mx.array) -> Any:
        fetched = original(self, keys, values)
        _ = self.offset  # advanced now
        return fetched

    return update_and_fetch


def _one_offset_for_all_layers() -> Plant:
    """The caches of all layers hold one array of offsets, and each of them adds to it."""

    def gathering(original: Any) -> Any:
        def batch(self: Any, *given: Any) -> Any:
            result = original(self, *given)
            shared = [mx.array([[n] for n in self._batch[0].offsets], mx.int32)] if self._batch else []
            for cache in self._batch:
                cache.shared = shared
            return result

        return batch

    def adding(original: Any) -> Any:
        def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
            grown = mx.array([[n] for n in self.prepared or (keys.shape[2],) * self.batch], mx.int32)
            fetched = original(self, keys, values)
            self.shared[0] = self.shared[0] + grown
            return fetched

        return update_and_fetch

    def reading(original: Any) -> Any:
        return property(lambda self: self.shared[0] if hasattr(self, "shared") else original.fget(self))

    return both(
        replacing(BatchPool, "batch", gathering),
        replacing(BatchPool, "_on_row", gathering),
        replacing(BatchKVCache, "update_and_fetch", adding),
        replacing(BatchLengths, "offset", reading),
    )


def _fetches(keep: Callable[[mx.array], mx.array]) -> Plant:
    """Remembers ``keep(keys)`` of those that a cache gave out, and clears them in its next front trim. Beside the
    caches: a copy that hangs on one would be memory that the engine keeps, which is another bug."""
    given_out: WeakKeyDictionary[KVCache, mx.array] = WeakKeyDictionary()

    def fetching(original: Any) -> Any:
        def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> Any:
            fetched = original(self, keys, values)
            given_out[self] = keep(fetched[0])
            return fetched

        return update_and_fetch

    def trimming(original: Any) -> Any:
        def trim_front(self: KVCache, n: int, keep: int = 0) -> int:
            removed: int = original(self, n, keep)
            given: mx.array | None = given_out.pop(self, None)
            if given is not None and removed:
                given[:, :, :removed] = 0
            return removed

        return trim_front

    return both(replacing(KVCache, "update_and_fetch", fetching), replacing(KVCache, "trim_front", trimming))


def _whole_buffers(original: Any) -> Any:
    """No slice where every slot is in use."""

    def live(self: Side, end: int) -> list[mx.array]:
        arrays: list[mx.array] = self.arrays if end == self.capacity else original(self, end)
        return arrays

    return live


def _rotates(target: Any) -> bool:
    return bool(target.storage.startswith("rotating"))


def _looks_at(tower: Any, writes: Callable[[mx.array], None]) -> Plant:
    def make(original: Any) -> Any:
        def look(self: Any, pixel_values: mx.array, grids: Any) -> Any:
            writes(pixel_values)
            return original(self, pixel_values, grids)

        return look

    return replacing(tower, "__call__", make)


def _scales(pixels: mx.array) -> None:
    pixels *= 0.5


def _consumes(original: Any) -> Any:
    """What a chunk has taken of the features is cleared: nobody will ask again."""

    def lay_over(self: Prompt, offset: int, tokens: mx.array, *rest: mx.array) -> Any:
        taken = original(self, offset, tokens, *rest)
        if offset < self.length:
            self.embeddings[:, offset : offset + tokens.shape[1]] = 0
        return taken

    return lay_over


FAULTS: tuple[Fault, ...] = (
    Fault(
        "tokens-cleared-in-place",
        "the model clears its tokens once it has their embeddings",
        _PURE,
        _embeds(_clears),
        _CALLER,
        layer="model",
    ),
    Fault(
        "mask-written-by-a-layer",
        "a layer hides a key in the mask that the layers behind it share",
        _PURE,
        _attends(_hides_the_oldest),
        "Shujun-He/RibonanzaNet#7",
        layer="attention",
    ),
    Fault(
        "batch-offset-advanced-in-place",
        "a batch has one array of offsets, which every append advances under those who hold it",
        _PURE,
        both(replacing(BatchLengths, "offset", _one_offset), replacing(BatchKVCache, "update_and_fetch", _advances)),
        "ml-explore/mlx-lm#1806",
        layer="batch",
    ),
    Fault(
        "batch-one-offset-for-all-layers",
        "the caches of all layers hold one array of offsets, and each append adds to it in place",
        "positions_are_absolute",
        _one_offset_for_all_layers(),
        "ml-explore/mlx-lm#1097",
        shown_on=lambda target: len(target.attention_layers) > 1,
        layer="positions",
    ),
    Fault(
        "trim-clears-what-was-given-out",
        "a front trim clears the rows that it drops, in the array that attention was given",
        _PURE,
        _fetches(lambda keys: keys),
        layer="cache",
    ),
    Fault(
        "full-ring-given-out",
        "a full ring gives out its buffer instead of a slice, and the next token is written into it",
        _PURE,
        replacing(Side, "live", _whole_buffers),
        source="sawfwair/mere-run#489 (appends wrote into arrays that others held, there a fork)",
        shown_on=_rotates,
        layer="cache",
    ),
)

IMAGE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "pixels-scaled-in-place",
        "the vision tower scales the pixels that it was given",
        _PURE,
        both(*(_looks_at(module.Tower, _scales) for module in (qwen2_vision, qwen3_vision))),
        _CALLER,
        layer="images",
    ),
    Fault(
        "image-features-cleared-once-used",
        "a chunk clears the features that it took from the prompt, which a rollback or another sequence needs again",
        _PURE,
        replacing(Prompt, "lay_over", _consumes),
        source="youssofal/MTPLX#296 (features were gone behind a restore)",
        layer="images",
    ),
)
"""Of the path with images alone."""

VARIATIONS: tuple[Fault, ...] = (
    Fault(
        "writes-into-its-own-copies",
        "tokens, masks and keys are copied, and the copies written to",
        None,
        both(_embeds(_clears_a_copy), _attends(_hides_in_a_copy), _fetches(mx.array)),
    ),
    Fault(
        "writes-back-what-was-there",
        "a layer writes the mask that it was given into itself",
        None,
        _attends(_writes_back),
    ),
)
