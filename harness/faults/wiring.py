"""Bugs of who gets whose: another layer's mask or cache, another turn's ids; and of whom a failure reaches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import both, replacing
from harness.targets.reference_session import ReferenceSession
from reference_models import layers, nemotron_nas
from reference_models.engine import CachePool, CannotTrim, KVCache, RotatingKVCache, masks
from reference_models.engine.pool import TrimReport
from reference_models.prompt import Prompt

_WIDTH = "mask_key_axis_equals_live_keys"
_LENGTHS = "keys_equal_ledger_live_length"
_POSITIONS = "positions_are_absolute"
_ISOLATED = "sequences_are_isolated"


def _from_the_cursor(original: Any) -> Any:
    def chunk_mask(l: int, cache: Any, policy: str = "live", window: int | None = None) -> mx.array | None:
        cursor = cache._overwritten(1) if isinstance(cache, RotatingKVCache) else None
        mask: mx.array | None = original(l, cache, policy, window)
        return mask if cursor is None or l == 1 else masks.causal_mask(l, cursor, window)

    return chunk_mask


@contextmanager
def _mask_of_another_layer() -> Iterator[None]:
    """A mask is made from the cache of the last layer, or of the first, where it should be the other way round."""
    ends: list[Any] = []

    def checking(original: Any) -> Any:
        def check_inputs(tokens: mx.array, caches: Sequence[Any], *rest: Any) -> None:
            original(tokens, caches, *rest)
            ends[:] = caches[0], caches[-1]

        return check_inputs

    def making(original: Any) -> Any:
        def mask_for(l: int, cache: Any, *rest: Any) -> mx.array | None:
            first, last = ends
            mask: mx.array | None = original(l, last if cache is first else first, *rest)
            return mask

        return mask_for

    with both(replacing(layers, "check_inputs", checking), replacing(masks, "mask_for", making))():
        yield


def _layers_differ(target: Any) -> bool:
    return (target.rules[0] is None) != (target.rules[-1] is None)


def _by_layer(order: Sequence[int]) -> list[int]:
    """The cache of every attention layer, where it is looked up by the number of the layer."""
    return [layer % len(order) for layer in order]


def _counts_every_layer(original: Any) -> Any:
    def forward(self: Any, tokens: mx.array, caches: Sequence[Any], *rest: Any) -> mx.array:
        order = _by_layer(self.attention_layers)
        out: mx.array = original(self, tokens, [caches[number] for number in order], *rest)
        return out

    return forward


def _skips_layers(target: Any) -> bool:
    """Are there layers without a cache, so that two others get the same?"""
    order = target.attention_layers
    return isinstance(target.variant.config, nemotron_nas.Config) and len(set(_by_layer(order))) < len(order)


def _makes_room(original: Any) -> Any:
    def trim_front(self: CachePool, seq: int, n: int, keep: int = 0) -> TrimReport:
        try:
            report: TrimReport = original(self, seq, n, keep)
        except CannotTrim:
            for other in self.sequences:
                if other != seq:
                    self.reset(other)
            raise
        return report

    return trim_front


def _trims_what_it_can(original: Any) -> Any:
    def trim_front(self: CachePool, seq: int, n: int, keep: int = 0) -> TrimReport:
        removed, refusals = [], []
        for cache in self.scheduler_slice(seq):
            try:
                removed.append(cache.trim_front(n, keep))
            except CannotTrim as refusal:
                refusals.append(refusal)
        if refusals:
            raise refusals[0]
        return TrimReport(n, tuple(removed))

    return trim_front


def _raises_when_empty(original: Any) -> Any:
    def update_and_fetch(self: KVCache, keys: mx.array, values: mx.array) -> Any:
        if self.live_len == 0 and self.offset > 0:
            raise RuntimeError("no buffer to append to")
        return original(self, keys, values)

    return update_and_fetch


def _clears_the_pool(original: Any) -> Any:
    def forward(self: Any, sequence: int, *given: Any) -> Any:
        seen = original(self, sequence, *given)
        if seen.error is not None:
            for seq in self._ids:
                self._pool.reset(seq)
        return seen

    return forward


def _ids_from_the_start(original: Any) -> Any:
    def lay_over(self: Prompt, offset: int, tokens: mx.array, *rest: mx.array) -> Any:
        embeddings, ids, deepstack = original(self, offset, tokens, *rest)
        inside = min(max(self.length - offset, 0), tokens.shape[1])
        ids = mx.concatenate([self.position_ids[..., :inside], ids[..., inside:]], axis=-1)
        return embeddings, ids, deepstack

    return lay_over


def _keeps_the_delta(original: Any) -> Any:
    def reset(self: Any, sequence: int) -> Any:
        old: Prompt | None = self._prompts[sequence]
        seen = original(self, sequence)
        if old is not None and seen.caches:
            self._prompts[sequence] = dataclasses.replace(
                old,
                tokens=old.tokens[:, :0],
                embeddings=old.embeddings[:, :0],
                position_ids=old.position_ids[..., :0],
                deepstack=(),
            )
        return seen

    return reset


FAULTS: tuple[Fault, ...] = (
    Fault(
        "mask-from-the-ring-cursor",
        "behind a full ring the mask of a chunk is as wide as the slot that comes next",
        _WIDTH,
        replacing(masks, "chunk_mask", _from_the_cursor),
        source="jundot/omlx#2201 (a mask as wide as a count that falls short of what is written)",
        shown_on=lambda target: target.storage.startswith("rotating"),
        layer="mask",
    ),
    Fault(
        "mask-of-another-layer",
        "masks are made from the cache of a layer of another kind, which holds another number of keys",
        _WIDTH,
        _mask_of_another_layer,
        source="huggingface/transformers#48482",
        shown_on=_layers_differ,
        layer="mask",
    ),
    Fault(
        "cache-index-counts-layers-without-one",
        "caches are looked up by the number of the layer, though no-op and linear layers have none: two get the same",
        "every_operation_completes",  # they have other numbers of heads
        replacing(nemotron_nas.Model, "__call__", _counts_every_layer),
        source="invergent-ai/surogate#115",
        shown_on=_skips_layers,
        layer="model",
    ),
    Fault(
        "refused-trim-clears-the-others",
        "where a cache cannot be trimmed, the pool makes room by emptying every other sequence",
        _ISOLATED,
        replacing(CachePool, "trim_front", _makes_room),
        source="deepspeedai/DeepSpeed-MII#403 (who could not be scheduled cost all their keys)",
        shown_on=lambda target: any(target.rules),
        layer="pool",
    ),
    Fault(
        "refused-trim-is-done-in-part",
        "a trim that one layer refuses has already been done in the others",
        _LENGTHS,
        replacing(CachePool, "trim_front", _trims_what_it_can),
        source="waybarrios/vllm-mlx#680",
        shown_on=_layers_differ,
        layer="pool",
    ),
    Fault(
        "an-error-clears-the-pool",
        "a forward that raises takes the keys of every sequence with it",
        _ISOLATED,
        both(
            replacing(KVCache, "update_and_fetch", _raises_when_empty),
            replacing(ReferenceSession, "forward", _clears_the_pool),
        ),
        source="jjang-ai/vmlx#225 (one error ended all running requests)",
        layer="pool",
    ),
)

IMAGE_FAULTS: tuple[Fault, ...] = (
    Fault(
        "position-ids-not-sliced",
        "every chunk of a prompt gets the first of its position ids",
        _POSITIONS,
        replacing(Prompt, "lay_over", _ids_from_the_start),
        layer="positions",
    ),
    Fault(
        "rope-delta-kept-across-turns",
        "behind a reset text is still moved by what the images of the turn before saved",
        _POSITIONS,
        replacing(ReferenceSession, "reset", _keeps_the_delta),
        layer="positions",
    ),
)
"""Of the path with images alone."""
