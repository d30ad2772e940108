"""Requests to ``BatchGenerator``, and its model under watch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from harness.images import token_ids
from harness.operations import EnforceMaxKvSize
from harness.rules import QuantisedStorage
from harness.target import (
    ArgumentsObservation,
    AttentionCall,
    CacheMemory,
    CopyObservation,
    ForwardObservation,
    PositionCall,
    RemovalObservation,
)
from harness.targets import mlx_lm_caches as held
from harness.targets.mlx_lm_calls import in_order
from harness.targets.mlx_lm_session import probe

NO_TRIM = "the generator takes no token of a request back"
_Floats = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class WatchedForward:
    """One forward of the model in the generator: of how many tokens each row, logits [B, l, vocab], seconds, what the
    probe saw, and of every attention call how many slots in front of the keys of a row hold nothing."""

    width: int
    logits: _Floats
    seconds: float
    attention: tuple[AttentionCall, ...]
    positions: tuple[PositionCall, ...]
    fronts: tuple[list[int], ...]


class WatchedModel:
    """The model as its generator calls it; every forward is kept in ``seen``. ``calls``: which leaf of a prompt cache
    every attention call reads."""

    def __init__(self, model: Any, calls: Sequence[int]) -> None:
        self._model, self._calls = model, tuple(calls)
        self.told = False
        self.seen: list[WatchedForward] = []

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        leaves = [leaf for _, leaf in held.leaves(cache)]
        read = [leaves[at] for at in self._calls]
        before = [[max(0, n) for n in leaf.offset.tolist()] for leaf in read]
        with probe().watching(self.told) as record:
            started = time.perf_counter()
            out: mx.array = self._model(ids, cache=cache)
            mx.eval(out, record.arrays, [each.state for each in cache if not held.is_empty(each)])
            seconds = time.perf_counter() - started
        seen = zip(record.attention(), read, before, strict=False)
        # Now: behind its step the generator may have turned the caches again.
        attention = tuple(in_order(call, leaf, counts, ids.shape[1]) for call, leaf, counts in seen)
        fronts = tuple(map(_missing, read, before))
        logits = np.array(out.astype(mx.float32))
        self.seen.append(WatchedForward(ids.shape[1], logits, seconds, attention, record.positions(), fronts))
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _missing(cache: Any, before: Sequence[int]) -> list[int]:
    """Of every row of a batch, how many keys it shows less than the row that shows most."""
    shown = [min(count, cache.max_size - 1) if held.kind_of(cache) == "rotating" else count for count in before]
    return [max(shown) - count for count in shown]


class Contradiction(Exception):
    """What generation says is not what it did."""


@dataclass(eq=False)
class Request:
    """A sequence: number ``uid`` of its ``generator``, or, where that is None, at rest with its ``caches`` (None: it
    has none yet). ``fed``: the tokens that they hold; ``count``: how many it ever processed; ``due``: what its sampler
    drew, or the last token of its prompt; ``read``: how many of its prompt went forward; ``logits`` and ``drawn_from``:
    of its last token, as its processor and its sampler were given them ([vocab], None before)."""

    sequence: int
    vocab_size: int
    fed: list[int] = field(default_factory=list)
    count: int = 0
    generator: Any = None
    uid: int = -1
    caches: list[Any] | None = None
    due: int = -1
    read: int = 0
    logits: _Floats | None = None
    drawn_from: _Floats | None = None

    def upcoming(self) -> int:
        """The token that the program feeds next, if it decodes."""
        return token_ids(self.sequence, 1, self.count, self.vocab_size)[0]

    def process(self, context: mx.array, logits: mx.array) -> mx.array:
        """Its logits processor: [1, vocab] are looked at and given back."""
        self.logits = np.array(logits[0].astype(mx.float32))
        return logits

    def sample(self, logprobs: mx.array) -> mx.array:
        """Its sampler, [1, vocab] -> [1]."""
        self.drawn_from = np.array(logprobs[0].astype(mx.float32))
        return mx.array([self.due], mx.uint32)

    def as_handed_out(self, seen: ForwardObservation) -> ForwardObservation:
        """A forward of the model, with the logits that this request was handed out for its last token, if it was."""
        if self.logits is None or seen.logits is None:
            return seen
        logits, self.logits = np.concatenate([seen.logits[:-1], self.logits[None]]), None
        return dataclasses.replace(seen, logits=logits)

    def enter(self, generator: Any, uid: int) -> None:
        """It is a request now, with a prompt to be read."""
        self.generator, self.uid, self.caches, self.drawn_from, self.read = generator, uid, None, None, 0

    def read_on(self, read: int) -> int:
        """So many tokens of its prompt have been read; how many were they this time?"""
        more, self.read = read - self.read, read
        return more

    def leave(self) -> None:
        """It is removed, if it is a request; its caches are what the generator gives back. Contradiction."""
        if self.generator is not None:
            self.rest(*self.generator.remove([self.uid], return_prompt_caches=True)[self.uid])

    def copy_of_caches(self) -> list[Any] | None:
        """Those at rest are shared, not copied: the generator promises not to write into prompt caches."""
        if self.generator is None:
            return self.caches
        caches: list[Any] = self.generator.extract_cache([self.uid])[self.uid][0]
        return caches

    def replace(self, caches: list[Any] | None, fed: Sequence[int]) -> None:
        """It is removed, and others take the place of its caches."""
        if self.generator is not None:
            self.generator.remove([self.uid])
        self.generator, self.caches, self.fed = None, caches, list(fed)

    def rest(self, caches: list[Any], tokens: Sequence[int]) -> None:
        """It is no request any more. Contradiction where the tokens that came with the caches are not those it was
        fed."""
        self.generator, self.caches = None, caches
        if list(tokens) != self.fed:
            raise Contradiction(f"request {self.uid} came back with the tokens {list(tokens)}, it was fed {self.fed}")

    def heed(self, response: Any, drawn_from: _Floats | None) -> None:
        """What a response says; ``drawn_from``: the logprobs that its token was drawn from, None of the last token of a
        prompt. Contradiction."""
        if response.token != self.fed[-1]:
            raise Contradiction(f"request {self.uid} was answered with token {response.token}, {self.fed[-1]} was due")
        said = np.array(response.logprobs.astype(mx.float32))
        if drawn_from is not None and not np.array_equal(said, drawn_from, equal_nan=True):
            raise Contradiction(
                f"the logprobs in the answer of request {self.uid} are not those that its token was drawn from "
                f"(largest difference {float(np.abs(said - drawn_from).max()):.3g})"
            )
        if response.finish_reason is not None:
            self.rest(response.prompt_cache, response.all_tokens)


class TrimsNothing:
    """What no request can; never called, since the target does not say that it can."""

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation:
        raise NotImplementedError(NO_TRIM)

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        raise NotImplementedError(NO_TRIM)

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation:
        raise NotImplementedError(NO_TRIM)

    def save_and_load(self, sequence: int) -> CopyObservation:
        raise NotImplementedError("the generator writes no files")

    def quantise(self, sequence: int, storage: QuantisedStorage) -> CopyObservation:
        raise NotImplementedError("the generator quantises nothing")

    def memory(self, sequence: int) -> tuple[CacheMemory, ...]:
        raise NotImplementedError("the caches of mlx-lm say no size of a slot")

    def footprint(self) -> int:
        raise NotImplementedError("what keeps the caches of mlx-lm is this session")

    def watch_arguments(self) -> None:
        raise NotImplementedError("arrays that mlx-lm's models make are not watched")

    def arguments(self) -> ArgumentsObservation:
        raise NotImplementedError("arrays that mlx-lm's models make are not watched")
