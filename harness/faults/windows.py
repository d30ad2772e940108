"""Bugs of sliding windows: they show only on a target that has them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import replacing
from reference_models.engine import masks

_CONTENT = "mask_shows_exactly_the_visible_set"


def _window(change: Callable[[int, Any], int | None]) -> Callable[[], AbstractContextManager[None]]:
    """Changes the window of every mask that has one: ``change(window, cache)``."""

    def make(original: Any) -> Any:
        def chunk_mask(l: int, cache: Any, policy: str = "live", window: int | None = None) -> mx.array | None:
            mask: mx.array | None = original(l, cache, policy, None if window is None else change(window, cache))
            return mask

        return chunk_mask

    return replacing(masks, "chunk_mask", make)


def _window_in_slots(original: Any) -> Any:
    def chunk_mask(l: int, cache: Any, policy: str = "live", window: int | None = None) -> mx.array | None:
        before = masks.key_axis_before(cache, policy)  # type: ignore[arg-type]
        if window is None or (l == 1 and before < window):
            mask: mx.array | None = original(l, cache, policy)
            return mask
        return masks.causal_mask(l, before, window)

    return chunk_mask


def _no_window_for_one(original: Any) -> Any:
    def chunk_mask(l: int, cache: Any, policy: str = "live", window: int | None = None) -> mx.array | None:
        return None if l == 1 else original(l, cache, policy, window)

    return chunk_mask


def _has_windows(target: Any) -> bool:
    return any(target.windows)


FAULTS: tuple[Fault, ...] = (
    Fault(
        "window-one-too-wide",
        "a sliding window does not count the query's own key",
        _CONTENT,
        _window(lambda window, cache: window + 1),
        "ml-explore/mlx-lm#390",
        shown_on=_has_windows,
        layer="mask",
    ),
    Fault(
        "window-one-too-narrow",
        "a sliding window counts the query's own key twice",
        _CONTENT,
        _window(lambda window, cache: max(1, window - 1)),
        source="vllm-project/vllm#3385",
        shown_on=_has_windows,
        layer="mask",
    ),
    Fault(
        "window-counts-slots",
        "a sliding window counts the keys held, not positions, so behind kept sinks it reaches too far back",
        _CONTENT,
        replacing(masks, "chunk_mask", _window_in_slots),
        source="trymirai/lalamo#200 (a window over rows instead of absolute positions)",
        shown_on=_has_windows,
        layer="mask",
    ),
    Fault(
        "full-mask-on-windowed-layers",
        "layers with a sliding window get the mask of those without",
        _CONTENT,
        _window(lambda window, cache: None),
        source="labscommunity/cascadia#151",
        shown_on=_has_windows,
        layer="mask",
    ),
    Fault(
        "no-window-for-one-token",
        "a single token gets no mask on a layer with a sliding window, so it sees every key held",
        _CONTENT,
        replacing(masks, "chunk_mask", _no_window_for_one),
        "rajveer43/VeloxQuant-MLX#463",
        shown_on=_has_windows,
        layer="mask",
    ),
    Fault(
        "window-shrinks-with-trims",
        "a sliding window is counted from the live length, so every front trim narrows it",
        _CONTENT,
        _window(lambda window, cache: max(1, window - cache.live_start)),
        shown_on=_has_windows,
        layer="mask",
    ),
)
