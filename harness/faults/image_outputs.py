"""Bugs of the path with images that show in the logits alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models import prompt as prompts
from reference_models import rope
from reference_models.engine import CachePool
from reference_models.prompt import Prompt

_CACHE_FREE = "outputs_equal_the_cache_free_forward"
_WITNESS = "outputs_equal_the_witness"

Plant = Callable[[], AbstractContextManager[None]]


def _overlaid(change: Callable[[Prompt, int, mx.array, Any], Any]) -> Plant:
    """Changes what a forward takes from a prompt: ``change(prompt, offset, text embeddings, what it took)``."""

    def make(original: Any) -> Any:
        def lay_over(self: Prompt, offset: int, tokens: mx.array, embeddings: mx.array, ids: mx.array) -> Any:
            return change(self, offset, embeddings, original(self, offset, tokens, embeddings, ids))

        return lay_over

    return replacing(Prompt, "lay_over", make)


def _deepstack_at_the_start_only(prompt: Prompt, offset: int, text: mx.array, took: Any) -> Any:
    return took if offset == 0 else (*took[:2], ())


def _text_in_a_later_chunk(prompt: Prompt, offset: int, text: mx.array, took: Any) -> Any:
    return took if offset == 0 else (text, *took[1:])


@contextmanager
def _features_at_live_positions() -> Iterator[None]:
    """Rows of the prompt are taken at the number of keys held; a trim makes that another row."""
    start = 0

    def watch(original: Any) -> Any:
        def forward_caches(self: CachePool, seq: int) -> Any:
            nonlocal start
            caches = original(self, seq)
            start = caches[0].live_start
            return caches

        return forward_caches

    def shift(prompt: Prompt, offset: int, text: mx.array, took: Any) -> Any:
        inside = min(max(prompt.length - offset, 0), text.shape[1])
        if not inside or offset < start:
            return took
        rows = prompt.embeddings[:, offset - start : offset - start + inside]
        return (mx.concatenate([rows, text[:, inside:]], axis=1), *took[1:])

    with replacing(CachePool, "forward_caches", watch)(), _overlaid(shift)():
        yield


def _other_sections(original: Any) -> Any:
    """The ids are right; which of the three turns a pair is not."""

    def mrope_angles(ids: mx.array, inv_freq: mx.array, sections: Any, interleaved: bool) -> Any:
        later = bool((ids.min() > 0).item())
        return original(ids, inv_freq, sections, interleaved=interleaved != later)

    return mrope_angles


def _a_token_late(original: Any) -> Any:
    def scattered(rows: mx.array, where: mx.array, features: mx.array) -> mx.array:
        out: mx.array = original(rows, where, mx.roll(features, 1, 0))
        return out

    return scattered


def _has_deepstack(target: Any) -> bool:
    return bool(getattr(target.variant.config.vision, "deepstack_visual_indexes", ()))


FAULTS: tuple[Fault, ...] = (
    Fault(
        "deepstack-in-the-first-chunk-only",
        "features are added to early layers at offset 0 only, so a prompt in chunks loses the rest",
        _CACHE_FREE,
        _overlaid(_deepstack_at_the_start_only),
        source="Blaizzy/mlx-vlm#1332",
        shown_on=_has_deepstack,
        layer="images",
    ),
    Fault(
        "features-at-live-positions",
        "after a trim a chunk takes the image features of another part of the prompt",
        _CACHE_FREE,
        _features_at_live_positions,
        source="Blaizzy/mlx-vlm#2256 (features of the whole prompt at the places of a chunk)",
        layer="images",
    ),
    Fault(
        "placeholders-in-a-later-chunk",
        "the part of an image that a later chunk brings keeps the embeddings of the placeholder",
        _CACHE_FREE,
        _overlaid(_text_in_a_later_chunk),
        source="EricLBuehler/mistral.rs#2301",
        layer="images",
    ),
    Fault(
        "other-sections-in-a-later-chunk",
        "the right ids turn the wrong pairs (chunked for interleaved, or the other way round)",
        _CACHE_FREE,
        replacing(rope, "mrope_angles", _other_sections),
        source="alibaba/MNN#4133 (interleaved sections were turned as blocks)",
        layer="positions",
    ),
    Fault(
        "features-a-token-late",
        "the features of an image stand one token behind their place",
        _WITNESS,
        replacing(prompts, "_scattered", _a_token_late),
        source="osaurus-ai/vmlx-swift#298 (rows of features on placeholders that are not theirs)",
        layer="images",
    ),
)
"""As in ``harness.faults.outputs``: no other property finds one of these."""
