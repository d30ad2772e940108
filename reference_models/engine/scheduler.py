"""When the KV cache is bounded: ``enforce_max_kv_size`` and the forwards around it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import mlx.core as mx

from .kv_cache import KVCache
from .pool import CachePool, TrimReport

Generation = Literal["trim", "sinks", "shift"]
"""(a) trim the excess; (b) the same, keeping up to 4 sinks; (c) context shift."""

Forward = Callable[[mx.array, Sequence[KVCache]], mx.array]
"""Tokens ``[1, l]`` and the caches of the sequence to logits."""

_SINKS = 4


@dataclass(frozen=True)
class EnforceReport:
    """What one enforcement decided and did; lengths in tokens.

    Attributes:
        live_before: live length that the scheduler saw (0 for a model-owned sequence).
        keep: sinks, after the clamps of the generation.
        depth: tokens to drop; 0 when nothing had to be done.
        trim: the trim; it visited no cache (``removed == ()``) when depth is 0.
    """

    seq: int
    limit: int
    generation: Generation
    live_before: int
    keep: int
    depth: int
    trim: TrimReport


def enforce_max_kv_size(
    pool: CachePool,
    seq: int,
    limit: int,
    generation: Generation = "trim",
    keep: int = 4,
    n_discard: int = 0,
) -> EnforceReport:
    """Bound the live length of a sequence; nothing happens while ``live_len <= limit``.

    With ``excess = offset - live_start - limit`` (of dense caches ``live_len - limit``):

    * "trim" drops ``excess`` and keeps no sinks;
    * "sinks" drops ``excess`` and keeps ``min(4, limit - 1)``;
    * "shift" keeps ``clamp(keep, 0, max(0, limit - 4))`` and drops the larger of ``excess`` and
      ``n_discard`` (if 0: half of the tokens beyond the retained prefix), at most all beyond the prefix.

    The scheduler only sees the slice that the pool hands out. For a model-owned sequence that slice is
    empty, the live length it sees is 0, and it trims nothing, however long the model's caches are:
    ``live_before == 0``, ``depth == 0`` and ``trim.removed == ()``.

    Args:
        pool: the pool in which ``seq`` is open.
        seq: the sequence.
        limit: largest live length allowed afterwards, in tokens, >= 1.
        generation: which historic rule.
        keep: sinks wanted, in slots, >= 0; read by "shift" only.
        n_discard: least tokens to drop, >= 0; 0 for half; read by "shift" only.

    Raises:
        ValueError: a number is out of range or the generation is unknown.
        RuntimeError: a trim is due and the caches disagree in how far they go back, or cannot (CannotTrim).
        UnknownSequence: seq is not open.
    """
    _check_settings(limit, generation, keep, n_discard)
    # The longest cache decides: if the caches disagree, a short first one must not hide a due trim; the
    # pool raises on it instead.
    bounds = pool.bounds(seq)
    live = max((live_len for _, _, live_len in bounds), default=0)
    # What a trim counts: tokens since the last one, of which a cache with a rule of its own may see fewer.
    tokens = max((offset - start for offset, start, _ in bounds), default=0)
    depth = tokens - limit
    if generation == "trim":
        keep = 0
    elif generation == "sinks":
        keep = min(_SINKS, limit - 1)
    else:
        keep, depth = _context_shift(tokens, limit, keep, n_discard)
    if live <= limit:
        depth = 0
    trim = pool.trim_front(seq, depth, keep) if depth > 0 else TrimReport(0, ())
    return EnforceReport(seq, limit, generation, live, keep, depth, trim)


def _context_shift(tokens: int, limit: int, keep: int, n_discard: int) -> tuple[int, int]:
    """Slots to keep, and tokens to drop behind them, where ``tokens`` exceed ``limit``."""
    keep = min(keep, max(0, limit - 4))
    beyond = tokens - keep
    return keep, min(beyond, max(tokens - limit, n_discard if n_discard > 0 else beyond // 2))


@dataclass(frozen=True)
class Event:
    """One thing the scheduler did; lengths in tokens, of the first cache, whoever owns it.

    Attributes:
        tokens: ids given to a forward; () for an enforcement.
        report: of an enforcement; None for a forward.
    """

    kind: Literal["forward", "enforce"]
    seq: int
    tokens: tuple[int, ...]
    live_before: int
    offset_before: int
    report: EnforceReport | None = None


class Scheduler:
    """Runs prefill, decode and verify rounds, and enforces the bound where an inference server does.

    AFTER every prefill forward, BEFORE every decode forward and every verify round. So inside a chunk of C
    tokens attention sees ``live_before + C`` keys, which may exceed the bound.

    Attributes:
        events: what was done, in order (an enforcement that had nothing to do is listed, too).
    """

    def __init__(
        self,
        forward: Forward,
        pool: CachePool,
        max_kv_size: int | None,
        prefill_chunk_size: int | None,
        generation: Generation = "trim",
        keep: int = 4,
        n_discard: int = 0,
    ) -> None:
        """Bind a model's forward to a pool.

        Args:
            forward: tokens ``[1, l]`` (int32) and the caches of the sequence to logits.
            pool: where the sequences are open.
            max_kv_size: bound of the live length, in tokens, >= 1; None never enforces.
            prefill_chunk_size: tokens per prefill forward, >= 1; None prefills in one shot.
            generation: as in ``enforce_max_kv_size``, like ``keep`` and ``n_discard``.

        Raises:
            ValueError: a number is out of range or the generation is unknown.
        """
        _check_settings(1 if max_kv_size is None else max_kv_size, generation, keep, n_discard)
        if prefill_chunk_size is not None and prefill_chunk_size < 1:
            raise ValueError(f"prefill_chunk_size must be >= 1 or None, got {prefill_chunk_size}")
        self._model = forward
        self.pool = pool
        self.max_kv_size = max_kv_size
        self.prefill_chunk_size = prefill_chunk_size
        self.generation: Generation = generation
        self.keep = keep
        self.n_discard = n_discard
        self.events: list[Event] = []

    def prefill(self, seq: int, tokens: Sequence[int]) -> mx.array:
        """Prefill in chunks, the last one possibly shorter; enforce after each of them.

        Returns:
            Logits of the last chunk, as the forward gave them.

        Raises:
            ValueError: no tokens.
            UnknownSequence: seq is not open.
        """
        _check_tokens("prefill", tokens)
        size = self.prefill_chunk_size or len(tokens)
        for start in range(0, len(tokens), size):
            logits = self._forward(seq, tokens[start : start + size])
            self._enforce(seq)
        return logits

    def decode(self, seq: int, token: int) -> mx.array:
        """Enforce, then run one token. Returns its logits. Raises UnknownSequence."""
        return self.verify(seq, [token])

    def verify(self, seq: int, tokens: Sequence[int]) -> mx.array:
        """Enforce, then run a multi-token verify round (speculative decoding) in one forward.

        Returns:
            Logits of all the tokens, as the forward gave them.

        Raises:
            ValueError: no tokens.
            UnknownSequence: seq is not open.
        """
        _check_tokens("verify", tokens)
        self._enforce(seq)
        return self._forward(seq, tokens)

    def _forward(self, seq: int, tokens: Sequence[int]) -> mx.array:
        caches = self.pool.forward_caches(seq)
        # Recorded before the forward runs, so that a forward that throws is the last event.
        event = Event("forward", seq, tuple(tokens), self.pool.live_len(seq), self.pool.offset(seq))
        self.events.append(event)
        return self._model(mx.array([list(tokens)], dtype=mx.int32), caches)

    def _enforce(self, seq: int) -> None:
        if self.max_kv_size is None:
            return
        live, offset = self.pool.live_len(seq), self.pool.offset(seq)
        report = enforce_max_kv_size(self.pool, seq, self.max_kv_size, self.generation, self.keep, self.n_discard)
        self.events.append(Event("enforce", seq, (), live, offset, report))


def _check_settings(limit: int, generation: Generation, keep: int, n_discard: int) -> None:
    if limit < 1:
        raise ValueError(f"the bound of the KV cache must be >= 1 token, got {limit}")
    if generation not in get_args(Generation):
        raise ValueError(f"unknown generation {generation!r}: expected one of {get_args(Generation)}")
    if keep < 0:
        raise ValueError(f"keep must be >= 0, got {keep}")
    if n_discard < 0:
        raise ValueError(f"n_discard must be >= 0, got {n_discard}")


def _check_tokens(what: str, tokens: Sequence[int]) -> None:
    if len(tokens) == 0:
        raise ValueError(f"{what} needs at least one token")
