"""A target in plain NumPy that can be told to misbehave: what the judges see of it is under the test's control.

It keeps its rows in its own way (token ids with their positions), and shares no code with the ledger.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from kv_harness_fake_attention import attention_values
from kv_harness_fake_batch import BatchBug, BatchQuirk, FakeBatch
from kv_harness_fake_bugs import Bug, Quirk
from kv_harness_fake_copies import FakeCopies, FakeRows

from harness.operations import EnforceMaxKvSize, Owner
from harness.oracle import Expected, History
from harness.target import (
    AttentionCall,
    CacheLengths,
    CacheRows,
    Capability,
    ForwardObservation,
    ImageFormat,
    MaskKind,
    PositionCall,
    PromptInput,
    RemovalObservation,
    TargetIdentity,
)

_NOISE = itertools.count()


@dataclass(frozen=True)
class FakeTarget:
    """``fails_at``: the forward (counted over a session) that raises; ``hook`` is called in front of every forward."""

    bugs: frozenset[Bug | BatchBug] = frozenset()
    quirks: frozenset[Quirk | BatchQuirk] = frozenset()
    policy: Literal["live", "offset"] = "live"
    mask: MaskKind = "bool"
    lacks: frozenset[Capability] = frozenset()
    fails_at: int | None = None
    hook: Callable[[], None] = lambda: None
    attention_layers: tuple[int, ...] = (1, 4)
    windows: tuple[int | None, ...] = ()  # none anywhere
    vocab_size: int = 11
    variant: str = "plain"
    images: ImageFormat | None = None
    renewed: list[None] = field(default_factory=list, compare=False)  # one entry per call of renew
    capabilities: frozenset[Capability] = field(init=False)

    def __post_init__(self) -> None:
        lacks = self.lacks | (frozenset() if self.images else {Capability.IMAGES})
        if self.mask in ("causal", "none"):  # which cannot hide what pads a row at the left
            lacks |= {Capability.BATCH}
        object.__setattr__(self, "capabilities", frozenset(Capability) - lacks - {Capability.UNPADDED})
        object.__setattr__(self, "windows", self.windows or (None,) * len(self.attention_layers))

    @property
    def rules(self) -> tuple[None, ...]:
        return (None,) * len(self.attention_layers)

    @property
    def row_storage(self) -> str:
        return "rows"

    @property
    def row_widths(self) -> tuple[tuple[int, int], ...]:
        return ((2, 2),) * len(self.attention_layers)

    @property
    def identity(self) -> TargetIdentity:
        return TargetIdentity("fake", "fake", self.variant, self.policy, "rows", 0)

    def open(self, owners: tuple[Owner, ...]) -> FakeSession:
        return FakeSession(self, owners)

    def renew(self) -> None:
        """Nothing is kept between sessions; only the calls are counted."""
        self.renewed.append(None)

    def counterpart(self) -> FakeTarget | None:
        if Capability.COUNTERPART in self.lacks:
            return None
        return replace(self, policy="offset" if self.policy == "live" else "live")

    def witness(self, history: History) -> Expected:
        behind = history.positions[:, None] - history.positions[None]
        weight = np.where(history.visible, 1 / (1.0 + np.maximum(behind, 0)), 0)
        logits = weight @ np.eye(self.vocab_size)[history.tokens]
        zeros = np.zeros(len(logits))
        choice = zeros if "experts nearly tie" in self.quirks else None
        return Expected(logits, choice, zeros if "rows nearly round to others" in self.quirks else None)

    def cache_free(self, history: History) -> Expected:
        if "raises without a cache" in self.bugs:
            raise RuntimeError("no way\nwithout a cache")
        return Expected(self.witness(history).logits.astype(np.float32))


class FakeSession(FakeBatch, FakeCopies):
    """A session of a FakeTarget."""

    def __init__(self, target: FakeTarget, owners: tuple[Owner, ...]) -> None:
        self._target = target
        self._sequences = [FakeRows(owner) for owner in owners]
        self._forwards = 0
        self.told = False
        self._slots: dict[int, FakeRows] = {}
        self._kept: list[FakeRows] = []
        self.prompts: dict[int, PromptInput] = {}

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        target, cache = self._target, self._sequences[sequence]
        if prompt is not None:
            self.prompts[sequence] = prompt
        target.hook()
        self._forwards += 1
        before, start, count = len(cache.rows), cache.offset, len(tokens)
        cache.rows += [(start + i, token) for i, token in enumerate(tokens)]
        cache.offset += count
        cache.largest = max(cache.largest, len(cache.rows))
        made = [self._call(cache, before, start, count, window) for window in target.windows]
        call = made[0]
        calls = self._visible_calls(cache, [self._disguised(one) for one in made])
        error = None
        if call.mask_keys is not None and call.mask_keys != before + count:
            error, calls = f"ValueError: broadcast {call.mask_shape}", calls[:1]
        elif self._forwards == target.fails_at:
            error = "RuntimeError: told to fail"
        elif "raises after a trim to zero" in target.bugs and before == 0 < start:
            error, calls = "RuntimeError: no buffer\n to append to", ()
        logits = None if error else self._logits(cache, start, count, call)
        given = np.arange(start, start + count)
        if "positions from live_len" in target.bugs:
            given = given - start + before
        positions = self._positions(PositionCall("rope", given), cache.trimmed)
        new = cache.rows[before:] if cache.storage != "rows" else []
        rows = np.array(new, np.float32).reshape(1, 1, -1, 2)
        told = (CacheRows(rows, -rows),) * len(target.attention_layers) if new and error is None else ()
        return ForwardObservation(tuple(tokens), logits, calls, positions, 0.001, error, told)

    def _positions(self, given: PositionCall, trimmed: bool) -> tuple[PositionCall, ...]:
        """The call as a probe would see it of another kind of model."""
        quirks, last = self._target.quirks, int(given.positions.max())
        table = PositionCall("rope", np.arange(last + 2))
        if "hides positions after a trim" in quirks and trimmed:
            return ()
        if "a table instead of positions" in quirks:
            return (table,)
        if "a table beside the positions" in quirks:
            return (table, given)
        if "a single number as position" in quirks:
            return (PositionCall("rope", np.array(last - given.positions.shape[-1] + 1)),)
        return (given,)

    def _call(self, cache: FakeRows, before: int, start: int, count: int, window: int | None) -> AttentionCall:
        target, keys = self._target, before + count
        keys -= "keys one short after rollback" in target.bugs and cache.rolled_back
        values = keys - ("values one short after a trim" in target.bugs and cache.trimmed)
        explicit = target.mask in ("bool", "additive")
        windowed = self._windowed(cache, start, count, window)
        unasked = windowed is None or "no window for one token" in target.bugs
        if count == 1 and unasked and not {"mask for one token", "scores for one token"} & target.quirks:
            explicit = False
        kind: MaskKind = target.mask if explicit or count > 1 else "none"
        if "no mask under the offset policy" in target.quirks and target.policy == "offset":
            explicit, kind = False, "causal" if count > 1 else "none"
        if not explicit:
            return AttentionCall("fast", count, keys, values, 4, 2, kind)
        width = before if target.policy == "live" else start
        shown = np.arange(width + count)[None] <= np.arange(width, width + count)[:, None]
        if windowed is not None:
            shown = shown & windowed
        if "mask leaks" in target.bugs:
            shown = np.concatenate([shown[1:], shown[-1:]])
        if "mask hides itself" in target.bugs:
            shown = shown & ~np.eye(count, width + count, width, dtype=bool)
        if "mask one row short" in target.bugs and count > 1:
            shown = shown[1:]
        if "one row for all queries when all are visible" in target.quirks and shown.all():
            shown = shown[:1]
        shape = shown.shape if "batch and head axes" not in target.quirks else (1, 1, *shown.shape)
        scores = count == 1 and "scores for one token" in target.quirks
        return AttentionCall("fast", count, keys, values, 4, 2, kind, shape, shown[None, None], scores)

    def _windowed(self, cache: FakeRows, start: int, count: int, window: int | None) -> np.ndarray[Any, Any] | None:
        """[count, keys]: which keys the window lets each new token see; None for all of them."""
        bugs = self._target.bugs
        if window is None or "no window" in bugs:
            return None
        where = np.array([position for position, _ in cache.rows])
        if "window counted in slots" in bugs:
            where = np.arange(len(where))
        if self._target.policy == "offset":
            where = np.arange(start + count)
        seen = where[-count:, None] - where < window + ("window one too wide" in bugs)
        return None if seen.all() else seen

    def _disguised(self, call: AttentionCall) -> AttentionCall:
        """The same call as a probe would see it of another kind of model."""
        quirks = self._target.quirks
        if "attention by hand" in quirks:
            call = replace(call, kind="softmax")
        if "quantised attention by hand" in quirks:
            call = replace(call, kind="quantised")
        if "a query too many" in self._target.bugs:
            call = replace(call, query_len=call.query_len + 1)
        if "queries of the last token only" in quirks:
            shown = None if call.shown is None else call.shown[..., -1:, :]
            call = replace(call, query_len=1, shown=shown, mask_shape=None if shown is None else shown.shape)
        return call

    def tell_attention(self) -> None:
        self.told = True

    def _visible_calls(self, cache: FakeRows, calls: list[AttentionCall], rows: int = 1) -> tuple[AttentionCall, ...]:
        quirks = self._target.quirks
        if self.told:
            off = "attention a little off" in self._target.bugs
            calls = [replace(call, values=attention_values(call, off, rows)) for call in calls]
        if "hides a call" in quirks or ("hides a call after a trim" in quirks and cache.trimmed):
            calls = calls[:-1]
        return tuple(calls[:1] * ("encoder call" in quirks) + calls)

    def _logits(self, cache: FakeRows, start: int, count: int, call: AttentionCall) -> np.ndarray[Any, Any]:
        target, held = self._target, cache.rows
        if "logits without the oldest row after a trim" in target.bugs and cache.trimmed:
            held = held[1:]
        if "logits without the newest row after a rollback" in target.bugs and cache.rolled_back:
            held = [*held[: -count - 1], *held[-count:]]
        logits = np.zeros((count, target.vocab_size), np.float32)
        logits += 0.01 * ("logits a little off after a trim" in target.bugs and cache.trimmed)
        for row in range(count):
            for position, token in held:
                if position <= start + row:
                    logits[row, token] += np.float32(1 / (1 + start + row - position))
        if "noise" in target.bugs:
            logits += np.float32(next(_NOISE))
        if "noise in two logits" in target.bugs:
            logits[-1, :2] += np.float32(next(_NOISE))
        if call.shown is not None and target.policy == "live":
            logits += np.float32(0.5 if "bias under the live policy" in target.bugs else 0)
            logits[0, 0] += np.float32("nan" if "nan logits under the live policy" in target.bugs else 0)
        if "nan logits after a trim" in target.bugs and cache.trimmed:
            logits[-1, 3] = np.float32("nan")
        if "inf logits after a trim" in target.bugs and cache.trimmed:
            logits[0, 2] = np.float32("-inf")
        if "the cut matters" in target.bugs:
            logits[:, -1] += np.float32(count)
        return logits[-1:] if "logits of the last token only" in target.bugs else logits

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation:
        target, cache = self._target, self._sequences[sequence]
        if cache.owner == "model" and "trims what the model owns" not in target.bugs:
            return RemovalObservation()
        gone = 0
        while gone < n and len(cache.rows) > 0:  # one by one: another way than the ledger's slice
            last = len(cache.rows) - 1
            cache.rows.pop(min(keep, last) if n - gone < len(cache.rows) else 0)
            gone += 1
        cache.trimmed |= gone > 0
        cache.front += gone
        if gone and "trims keep their memory" not in target.bugs:
            cache.largest = len(cache.rows)
        for other in self._sequences:
            if "neighbour trimmed too" in target.bugs and other is not cache and other.rows and gone:
                other.rows.pop(0)
        for row in self._batch if "a trim reaches the whole batch" in target.bugs and sequence in self._batch else ():
            if row != sequence:
                del self._sequences[row].rows[:n]
        told = 0 if "reports zero removed" in target.bugs else gone
        return RemovalObservation((told,) * (1 if "visits one cache" in target.bugs else len(target.attention_layers)))

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        cache = self._sequences[sequence]
        if cache.owner == "model":
            return RemovalObservation()
        gone = min(n, len(cache.rows))
        left = "a rollback leaves one" in self._target.bugs and gone > 0
        cache.rows = cache.rows[: len(cache.rows) - gone + left]
        cache.offset -= gone - left
        cache.rolled_back |= gone > 0
        cache.largest += 256 if "a rollback adds slots" in self._target.bugs else 0
        return RemovalObservation((gone,) * len(self._target.attention_layers))

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation:
        cache = self._sequences[rule.sequence]
        live = len(cache.rows)
        if live <= rule.limit or cache.owner == "model":
            return RemovalObservation(() if cache.owner == "model" else (0,) * len(self._target.attention_layers))
        keep, depth = 0, live - rule.limit
        if rule.generation == "sinks":
            keep = min(4, rule.limit - 1)
        elif rule.generation == "shift":
            keep = min(rule.keep, max(rule.limit - 4, 0))
            depth = min(live - keep, max(depth, rule.n_discard or (live - keep) // 2))
        return self.trim_front(rule.sequence, depth, keep)

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]:
        cache = self._sequences[sequence]
        live = len(cache.rows)
        told = cache.offset if "cache says offset for live_len" in self._target.bugs else live
        return (CacheLengths(cache.offset, cache.offset - live, told),) * len(self._target.attention_layers)

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        cache, bugs = self._sequences[sequence], self._target.bugs
        numbers = np.array(cache.rows, np.float32).reshape(1, 1, -1, 2)
        other_trimmed = any(other.trimmed for other in self._sequences if other is not cache)
        if ("rows change in a trim" in bugs and cache.trimmed) or (
            "rows of the neighbour change in a trim" in bugs and other_trimmed
        ):
            numbers = numbers + 1
        numbers = self._stored(cache, numbers)
        return (CacheRows(numbers, -numbers),) * len(self._target.attention_layers)
