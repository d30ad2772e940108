"""The batch of a FakeSession: rows of different lengths in one forward, padded at the left and at the right as engines
do it, so that what the judges see of it is what a probe would see. With bugs and quirks of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from harness.rows_of_a_batch import rows_of
from harness.target import AttentionCall, CopyObservation, ForwardObservation, MaskKind, PositionCall

BatchBug = Literal[
    "padding is shown",
    "padding is shown to one token",
    "the first row's mask for all",
    "positions of the longest row",
    "right padding is kept",
    "a key of the batch is missing",
    "who joins loses its newest key",
    "who stays gets another's keys when one leaves",
    "who leaves stands at its live length",
    "a trim reaches the whole batch",
    "rows mix in a batch",
    "a ragged batch raises",
    "joining raises",
]
BatchQuirk = Literal[  # harmless
    "a mask for every head",
    "right padding is hidden by causality alone",
    "right padding stands nowhere",
]
_Array = np.ndarray[Any, Any]


class FakeBatch:
    """What a FakeSession inherits. It has no caches of its own: a row of the batch is the sequence, wherever it is."""

    _target: Any
    _sequences: list[Any]
    _forwards: int
    _batch: tuple[int, ...] = ()

    # These four are the session's own, for one sequence; the batch uses them row by row.

    def _logits(self, cache: Any, start: int, count: int, call: AttentionCall) -> _Array:
        raise NotImplementedError

    def _positions(self, given: PositionCall, trimmed: bool) -> tuple[PositionCall, ...]:
        raise NotImplementedError

    def _disguised(self, call: AttentionCall) -> AttentionCall:
        raise NotImplementedError

    def _visible_calls(self, cache: Any, calls: list[AttentionCall], rows: int = 1) -> tuple[AttentionCall, ...]:
        raise NotImplementedError

    def batch(self, rows: tuple[int, ...]) -> CopyObservation:
        bugs = self._target.bugs
        joining, leaving = set(rows) - set(self._batch), set(self._batch) - set(rows)
        if "joining raises" in bugs and joining and self._batch:
            return CopyObservation(error="RuntimeError: told\n to fail")
        for row in joining:
            held = self._sequences[row].rows
            if "who joins loses its newest key" in bugs and held:
                held[-1] = (0, 0)
        if "who stays gets another's keys when one leaves" in bugs and leaving:
            for row in set(rows) & set(self._batch):
                self._sequences[row].rows = [(position, 0) for position, _ in self._sequences[row].rows]
        if "who leaves stands at its live length" in bugs:
            for row in leaving:
                self._sequences[row].offset = len(self._sequences[row].rows)
        self._batch = rows
        return CopyObservation(len(self._target.attention_layers) if rows else 0)

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        target, bugs, quirks = self._target, self._target.bugs, self._target.quirks
        target.hook()
        self._forwards += 1
        caches = [self._sequences[row] for row in self._batch]
        lengths, l = [len(row) for row in tokens], max(map(len, tokens))
        slots = max(len(cache.rows) for cache in caches)
        offsets = [cache.offset for cache in caches]
        held = [[position for position, _ in cache.rows] for cache in caches]
        for cache, mine in zip(caches, tokens, strict=True):
            kept = [*mine, *(0,) * (l - len(mine))] if "right padding is kept" in bugs else list(mine)
            cache.rows += [(cache.offset + i, token) for i, token in enumerate(kept)]
            cache.offset += len(kept)
            cache.largest = max(cache.largest, len(cache.rows))
        masks = [self._mask(held, offsets, lengths, l, slots, window) for window in target.windows]
        calls = [self._attention(mask, l, slots + l) for mask in masks]
        error = None
        if any(call.mask_keys not in (None, slots + l) for call in calls):
            error, calls = f"ValueError: broadcast {calls[0].mask_shape}", calls[:1]
        elif self._forwards == target.fails_at:
            error = "RuntimeError: told to fail"
        elif "a ragged batch raises" in bugs and min(lengths) < l:
            error, calls = "ValueError: ragged", []
        starts = [max(offsets)] * len(offsets) if "positions of the longest row" in bugs else offsets
        given = np.array(starts)[:, None] + np.arange(l)
        if "right padding stands nowhere" in quirks:
            given = np.where(np.arange(l) < np.array(lengths)[:, None], given, 0)
        logits = np.zeros((len(caches), l, target.vocab_size), np.float32)
        for row, (cache, start, count) in enumerate(zip(caches, offsets, lengths, strict=True)):
            logits[row, :count] = self._logits(cache, start, count, calls[0]) if calls else 0
            shown = np.ones((1, l, slots + l), bool) if masks[0] is None else masks[0][row]
            padding = shown[0, :, : slots - len(held[row])].sum(-1)[:count]
            logits[row, :count, 0] += 0 if target.policy == "offset" else padding
        if "rows mix in a batch" in bugs:
            logits[1:] += logits[:1] / 2
        if "queries of the last token only" not in quirks:  # of a ragged batch that would be padding
            calls = list(map(self._disguised, calls))
        trimmed = [cache for cache in caches if cache.trimmed]
        seen = self._visible_calls((trimmed or caches)[0], calls, len(tokens))
        positions = self._positions(PositionCall("rope", given), bool(trimmed))
        return rows_of(tokens, None if error else logits, seen, positions, 0.001, error)

    def _mask(
        self, held: list[list[int]], offsets: list[int], lengths: list[int], l: int, slots: int, window: int | None
    ) -> _Array | None:
        """[B, 1, l, K], by position; None where one token a row sees all there is, or where no mask is made."""
        target, bugs, quirks = self._target, self._target.bugs, self._target.quirks
        if target.policy == "offset":  # as if nothing had ever been trimmed
            slots = max(offsets)
            held = [list(range(offset)) for offset in offsets]
        rows = []
        for positions, offset, length in zip(held, offsets, lengths, strict=True):
            key = np.array([*(-1,) * (slots - len(positions)), *positions, *range(offset, offset + l)])
            query = offset + np.arange(l)[:, None]
            shown = (key <= query) & (key >= 0)
            shown &= True if window is None else query - key < window
            if "right padding is hidden by causality alone" not in quirks:
                shown[:, slots + length :] = False
                shown[np.arange(l), slots + np.arange(l)] = True  # a query that is padding sees itself
            if "padding is shown" in bugs or ("padding is shown to one token" in bugs and l == 1):
                shown |= key < 0
            rows.append(shown)
        made = np.stack(rows)[:, None]
        if l == 1 and made.all() and "mask for one token" not in quirks:
            return None
        if "the first row's mask for all" in bugs:
            made = np.broadcast_to(made[:1], made.shape)
        return np.repeat(made, 4, axis=1) if "a mask for every head" in quirks else made

    def _attention(self, mask: _Array | None, l: int, keys: int) -> AttentionCall:
        target = self._target
        keys -= "a key of the batch is missing" in target.bugs and len(self._batch) > 1
        kind: MaskKind = target.mask if mask is not None or l > 1 else "none"
        return AttentionCall("fast", l, keys, keys, 4, 2, kind, None if mask is None else mask.shape, mask)
