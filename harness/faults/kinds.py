"""Bugs of caches that forget by themselves: they show only on a target that has such caches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx

from harness.faults.model import Fault
from harness.faults.patching import Patch, replacing
from reference_models.engine import CannotTrim, ChunkedKVCache, RotatingKVCache, VisibilityRule
from reference_models.engine.ruled import RuledKVCache
from reference_models.engine.runs import found, joined

_LENGTHS = "keys_equal_ledger_live_length"
_CONTENT = "mask_shows_exactly_the_visible_set"
_ROWS = "cached_rows_stay_what_they_were"
_REPORTS = "trim_reports_what_it_removed"
_CACHE_FREE = "outputs_equal_the_cache_free_forward"

Plant = Callable[[], AbstractContextManager[None]]


def _named(*kinds: str) -> Callable[[Any], bool]:
    return lambda target: target.storage.startswith(kinds)


_rotating, _chunked = _named("rotating"), _named("chunked")
_ruled = _named("rotating", "chunked")


def _has_sinks(target: Any) -> bool:
    return any(rule is not None and rule.sinks for rule in target.rules)


def _made_with(kind: type, change: Callable[..., tuple[Any, ...]]) -> Plant:
    """Caches of this kind are made with other sizes than they were told."""

    def make(original: Any) -> Any:
        def init(self: Any, *sizes: Any) -> None:
            original(self, *change(*sizes))

        return init

    return replacing(kind, "__init__", make)


def _seen(change: Patch) -> Plant:
    return replacing(RuledKVCache, "_seen_from", change)


def _no_cut(original: Any) -> Any:
    return lambda self, query: found(self._held, [range(query)])


def _no_cut_for_one_token(original: Any) -> Any:
    """A single token behind an append of several is put behind all that is still there."""

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        if keys.shape[2] > 1:
            return original(self, keys, values)
        with _seen(_no_cut)():
            return original(self, keys, values)

    return update_and_fetch


def _cursor_one_off(original: Any) -> Any:
    def overwritten(self: Any, n: int) -> int | None:
        slot = original(self, n)
        return slot if slot is None else self.sinks + (slot - self.sinks + 1) % (self.window - self.sinks)

    return overwritten


def _order_of_slots(original: Any) -> Any:
    """A turned ring is taken for rows in order."""

    def keep(self: Any, parts: list[tuple[int, range]]) -> None:
        slots = sorted(slot + i for slot, run in parts for i in range(len(run)))
        for side in (self._keys, self._values):
            if side is not None:
                side.take([range(slot, slot + 1) for slot in slots])
        self._held = joined(run for _, run in parts)

    return keep


def _never_refuses(original: Any) -> Any:
    return lambda self, n: None


def _refuses_when_turned(original: Any) -> Any:
    """Every rollback behind a token that took the slot of another; harmless for the caller, and a lie."""

    def check_rollback(self: Any, n: int) -> None:
        if n and self.offset - self.live_start > self.live_len:
            raise CannotTrim("the ring has turned")
        original(self, n)

    return check_rollback


def _trims_slots(original: Any) -> Any:
    """The first n slots go, whatever stands in them."""

    def trim_front(self: Any, n: int, keep: int = 0) -> int:
        self.check_trim_front(n, keep)
        n = min(n, self.offset - self.live_start)
        slots = min(n, self.held_len)
        held = [position for run in self._held for position in run]
        self.live_start += n
        for side in (self._keys, self._values):
            if side is not None and slots:
                side.take([range(slots, len(held))])
        if slots:
            self._held = joined(range(position, position + 1) for position in held[slots:])
        return n

    return trim_front


def _mask_of(change: Callable[[VisibilityRule], VisibilityRule]) -> Plant:
    def make(original: Any) -> Any:
        def mask(self: VisibilityRule, queries: mx.array, keys: mx.array) -> mx.array:
            shown: mx.array = original(change(self), queries, keys)
            return shown

        return mask

    return replacing(VisibilityRule, "mask", make)


def _never_drops_a_chunk(original: Any) -> Any:
    def before(self: VisibilityRule, query: int) -> tuple[range, ...]:
        seen: tuple[range, ...] = original(self, query)
        return seen if self.chunk is None else tuple(part for part in (range(query),) if part)

    return before


FAULTS: tuple[Fault, ...] = (
    Fault(
        "ring-one-too-large",
        "a rotating cache keeps one key more than its window",
        _LENGTHS,
        _made_with(RotatingKVCache, lambda window, *rest: (window + 1, *rest)),
        "ml-explore/mlx-lm#390",
        shown_on=_rotating,
        layer="cache",
    ),
    Fault(
        "ring-one-too-small",
        "a rotating cache keeps one key less than its window",
        _LENGTHS,
        _made_with(RotatingKVCache, lambda window, sinks=0, *rest: (max(window - 1, sinks + 1), sinks, *rest)),
        source="ml-explore/mlx-examples#1093",
        shown_on=lambda target: any(rule and rule.window and rule.window - rule.sinks > 1 for rule in target.rules),
        layer="cache",
    ),
    Fault(
        "ring-never-cuts",
        "an append of several tokens keeps all old keys",
        _LENGTHS,
        _seen(_no_cut),
        source="rajveer43/VeloxQuant-MLX#274",
        shown_on=_ruled,
        layer="cache",
    ),
    Fault(
        "ring-cut-skipped-for-one-token",
        "a single token behind an append of several sees all that the append left",
        _LENGTHS,
        replacing(RuledKVCache, "update_and_fetch", _no_cut_for_one_token),
        source="ml-explore/mlx-lm#1914 (several tokens at once left more keys than the window)",
        shown_on=_ruled,
        layer="cache",
    ),
    Fault(
        "ring-cursor-one-off",
        "a single token takes the slot of the second oldest key",
        _CACHE_FREE,
        replacing(RotatingKVCache, "_overwritten", _cursor_one_off),
        source="awslabs/keys_values#140 (every partial write into a full ring corrupted it)",
        shown_on=lambda target: any(rule and rule.window and rule.window - rule.sinks > 1 for rule in target.rules),
        layer="cache",
    ),
    Fault(
        "ring-taken-for-rows-in-order",
        "an append of several tokens behind a turned ring does not put its rows in order of time first",
        _ROWS,
        replacing(RuledKVCache, "_keep", _order_of_slots),
        source="ollama/ollama#15591",
        shown_on=_rotating,
        layer="cache",
    ),
    Fault(
        "ring-rolls-back-across-its-turn",
        "a rollback to where keys have been overwritten is done as if they were there",
        _REPORTS,
        replacing(RuledKVCache, "check_rollback", _never_refuses),
        "ml-explore/mlx-swift-lm#424 (a rewind of a wrapped window silently did nothing)",
        shown_on=_ruled,
        layer="cache",
    ),
    Fault(
        "ring-refuses-once-turned",
        "a rollback is refused although all the keys that it needs are there",
        _REPORTS,
        replacing(RuledKVCache, "check_rollback", _refuses_when_turned),
        source="microsoft/onnxruntime-genai#2334 (rewinds to what is still held were refused)",
        shown_on=_ruled,
        layer="cache",
    ),
    Fault(
        "ring-loses-its-sinks",
        "a rotating cache keeps the newest keys of its window and no sinks",
        _LENGTHS,
        _made_with(RotatingKVCache, lambda window, sinks=0, *rest: (window, 0, *rest)),
        source="awslabs/keys_values#144 (the initial tokens were evicted first)",
        shown_on=_has_sinks,
        layer="cache",
    ),
    Fault(
        "sinks-beside-the-window",
        "sinks are kept in addition to the window instead of as a part of it",
        _LENGTHS,
        _made_with(RotatingKVCache, lambda window, sinks=0, *rest: (window + sinks, sinks, *rest)),
        shown_on=_has_sinks,
        layer="cache",
    ),
    Fault(
        "ring-trimmed-by-slots",
        "a front trim of a turned ring drops its first slots, which are not its oldest keys",
        _LENGTHS,
        replacing(RuledKVCache, "trim_front", _trims_slots),
        source="ggml-org/llama.cpp#3840",
        shown_on=lambda target: _ruled(target) and not _has_sinks(target),
        layer="cache",
    ),
    Fault(
        "mask-forgets-the-rule-of-the-cache",
        "the mask of a chunk shows every key that a rotating or chunked cache still returns",
        _CONTENT,
        _mask_of(lambda rule: VisibilityRule()),
        source="pytorch/executorch#21857",
        shown_on=_ruled,
        layer="mask",
    ),
    Fault(
        "chunk-one-too-long",
        "chunks of chunked attention have one token more",
        _LENGTHS,
        _made_with(ChunkedKVCache, lambda chunk, *rest: (chunk + 1, *rest)),
        source="ml-explore/mlx-lm#1673 (chunks were measured by the padded buffer)",
        shown_on=_chunked,
        layer="cache",
    ),
    Fault(
        "earlier-chunks-stay",
        "a chunked cache never drops the keys of earlier chunks",
        _LENGTHS,
        replacing(VisibilityRule, "before", _never_drops_a_chunk),
        source="Blaizzy/mlx-vlm#2036 (chunks were cut by the width of the buffer; there too much went)",
        shown_on=_chunked,
        layer="cache",
    ),
)
