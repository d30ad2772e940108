"""A session on an engine in another process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from harness.operations import EnforceMaxKvSize, Owner
from harness.rules import QuantisedStorage
from harness.target import (
    ArgumentsObservation,
    CacheLengths,
    CacheMemory,
    CacheRows,
    Capability,
    CopyObservation,
    EngineGone,
    ForwardObservation,
    PromptInput,
    RemovalObservation,
)
from harness.wire.engine import Engine
from harness.wire.process import WorkerError
from harness.wire.protocol import ForwardAnswer, Policy, TellingAnswer

_T = TypeVar("_T")


class WireSession:
    """A session on an engine: opened there with the first operation, gone when another is opened or the engine is.

    Once it has been asked what caches hold, it has that told with every answer but those of single tokens, of which
    there may be more before anybody asks again.
    """

    def __init__(
        self, engine: Engine, policy: Policy, owners: tuple[Owner, ...], capabilities: frozenset[Capability]
    ) -> None:
        self._engine, self._policy, self._owners = engine, policy, owners
        self._tells = capabilities & {Capability.LENGTHS, Capability.ROWS, Capability.BYTES}
        self._opened = self._attention = self._arguments = self._asked = False
        self._told: tuple[TellingAnswer, ...] | None = None

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        given = tuple(map(int, tokens))
        try:
            if prompt is not None:
                self._do("prompt", False, sequence=sequence, prompt=prompt)
            said = self._do("forward", len(given) > 1, sequence=sequence, tokens=given)
        except WorkerError as error:
            return ForwardObservation(given, None, error=_text(error))
        return _observation(given, said)

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        given = tuple(tuple(map(int, row)) for row in tokens)
        try:
            said = self._do("forward_batch", max(map(len, given)) > 1, tokens=given).rows
        except WorkerError as error:
            return tuple(ForwardObservation(row, None, error=_text(error)) for row in given)
        return tuple(map(_observation, given, said))

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation:
        return self._observe(RemovalObservation, "trim_front", sequence=sequence, n=n, keep=keep)

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        return self._observe(RemovalObservation, "rollback", sequence=sequence, n=n)

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation:
        return self._observe(RemovalObservation, "enforce", **dataclasses.asdict(rule))

    def snapshot(self, sequence: int, slot: int) -> CopyObservation:
        return self._observe(CopyObservation, "snapshot", sequence=sequence, slot=slot)

    def restore(self, sequence: int, slot: int) -> CopyObservation:
        return self._observe(CopyObservation, "restore", sequence=sequence, slot=slot)

    def fork(self, sequence: int, into: int) -> CopyObservation:
        return self._observe(CopyObservation, "fork", sequence=sequence, into=into)

    def save_and_load(self, sequence: int) -> CopyObservation:
        return self._observe(CopyObservation, "save_and_load", sequence=sequence)

    def reset(self, sequence: int) -> CopyObservation:
        return self._observe(CopyObservation, "reset", sequence=sequence)

    def quantise(self, sequence: int, storage: QuantisedStorage) -> CopyObservation:  # nor QUANTISE
        raise NotImplementedError("no engine is asked over the wire to quantise a cache in mid-program")

    def batch(self, rows: tuple[int, ...]) -> CopyObservation:
        return self._observe(CopyObservation, "batch", tell=False, rows=rows)  # mostly a forward follows

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]:
        return self._telling(sequence).lengths

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        return self._telling(sequence).rows

    def memory(self, sequence: int) -> tuple[CacheMemory, ...]:
        return self._telling(sequence).memory

    def footprint(self) -> int:  # nor FOOTPRINT
        raise NotImplementedError("no engine is measured over the wire")

    def tell_attention(self) -> None:
        self._attention = True

    def watch_arguments(self) -> None:
        self._arguments = True

    def arguments(self) -> ArgumentsObservation:
        if not self._opened:
            return ArgumentsObservation()
        said: ArgumentsObservation = self._or_gone(lambda: self._do("arguments", False))
        return said

    def _telling(self, sequence: int) -> TellingAnswer:
        """What is told of a sequence; asked for all of them at once, and once between two operations."""
        if not self._tells:
            return TellingAnswer()
        self._asked = True
        if self._told is None:
            self._or_gone(lambda: self._do("tell", True))
        assert self._told is not None
        if len(self._told) != len(self._owners):
            raise EngineGone(
                f"BadAnswer: the engine tells of {len(self._told)} sequences, {len(self._owners)} are open"
            )
        return self._told[sequence]

    @staticmethod
    def _or_gone(ask: Callable[[], _T]) -> _T:
        try:
            return ask()
        except WorkerError as error:
            raise EngineGone(_text(error)) from error

    def _observe(self, kind: Callable[..., _T], do: str, tell: bool = True, **fields: Any) -> _T:
        try:
            observed: _T = self._do(do, tell, **fields)
        except WorkerError as error:
            return kind(error=_text(error))
        return observed

    def _do(self, do: str, tell: bool, **fields: Any) -> Any:
        engine = self._engine
        if not self._opened:
            options = {"attention": self._attention, "arguments": self._arguments}
            engine.ask("open", owners=self._owners, policy=self._policy, **options)
            engine.session, self._opened = self, True
        elif engine.session is not self:
            raise WorkerError("the session is over: its engine has died, or another session was opened")
        if tell and self._asked and self._tells:
            fields["tell"] = True
        if do != "arguments":
            self._told = None
        said, told = engine.ask(do, **fields)
        if told is not None:
            self._told = told
        return said


def _text(error: WorkerError) -> str:
    return f"{type(error).__name__}: {error}"


def _observation(tokens: tuple[int, ...], said: ForwardAnswer) -> ForwardObservation:
    logits = said.logits
    if logits is not None and logits.dtype == np.float16:
        logits = logits.astype(np.float32)
    return ForwardObservation(tokens, logits, said.attention, said.positions, said.seconds, said.error)
