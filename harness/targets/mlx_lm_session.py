"""A session on a model of mlx-lm with the library's own caches, moved by the library's own operations."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from harness import scratch
from harness.operations import EnforceMaxKvSize, Owner
from harness.probe import Probe, Record
from harness.rows_of_a_batch import rows_of
from harness.rules import QuantisedStorage
from harness.target import (
    ArgumentsObservation,
    CacheLengths,
    CacheMemory,
    CacheRows,
    CopyObservation,
    ForwardObservation,
    PromptInput,
    RemovalObservation,
)
from harness.targets import mlx_lm_caches as held
from harness.targets import mlx_lm_quantised as quantised
from harness.targets import mlx_lm_release as release
from harness.targets.given import given_to
from harness.targets.mlx_lm_calls import in_order, of_its_chunk


class Library(Protocol):
    """The functions of ``mlx_lm.models.cache`` that a session calls."""

    def make_prompt_cache(self, model: Any) -> list[Any]: ...

    def can_trim_prompt_cache(self, cache: list[Any]) -> bool: ...

    def trim_prompt_cache(self, cache: list[Any], num_tokens: int) -> int: ...

    def save_prompt_cache(self, file_name: str, cache: list[Any]) -> None: ...

    def load_prompt_cache(self, file_name: str) -> list[Any]: ...


@functools.lru_cache(maxsize=1)
def probe() -> Probe:
    """Made once, when everything that a model needs has been imported."""
    return Probe()


class LibrarySession:
    """A prompt cache for every sequence; ``calls``: which leaf of it every attention call of a forward reads."""

    def __init__(self, model: Any, library: Library, calls: Sequence[int], owners: tuple[Owner, ...]) -> None:
        self._model, self._library, self._calls = model, library, tuple(calls)
        self._probe = probe()
        self._told = False
        self._caches = [library.make_prompt_cache(model) for _ in owners]
        self._slots: dict[int, list[Any]] = {}
        self._rows: tuple[int, ...] = ()
        self._batch: list[Any] = []

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        leaves = [leaf for _, leaf in held.leaves(self._caches[sequence])]
        read = [leaves[at] for at in self._calls]
        rules, starts = [held.rule_of(leaf) for leaf in read], [int(leaf.offset) for leaf in read]
        with given_to([cache for cache in read if hasattr(cache, "bits")]) as given:
            logits, record, seconds, error = self._watched(mx.array([list(tokens)]), self._caches[sequence])
        logits = None if logits is None else logits[0]
        calls = tuple(map(of_its_chunk, record.attention(), rules, starts))
        seen = calls, record.positions(), seconds, error, quantised.told(given)
        return ForwardObservation(tuple(tokens), logits, *seen)

    def _watched(self, ids: mx.array, caches: list[Any]) -> tuple[np.ndarray[Any, Any] | None, Record, float, Any]:
        """Logits ``[B, l, vocab]`` (None if it raised), what the probe saw, seconds, and the error."""
        logits, error = None, None
        with self._probe.watching(self._told) as record:
            started = time.perf_counter()
            try:
                out = self._model(ids, cache=caches).astype(mx.float32)
                mx.eval(out, record.arrays, [cache.state for cache in caches if not held.is_empty(cache)])
                logits = np.array(out)
            except Exception as failure:  # whatever a model raises is an observation, and the judges decide
                error = _words(failure)
            seconds = time.perf_counter() - started
        return logits, record, seconds, error

    def tell_attention(self) -> None:
        self._told = True

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        """``trim_prompt_cache``, asked first whether it can if speculative generation does; the one number that it
        returns is told of every cache."""
        try:
            if sequence in self._rows:
                return self._rollback_in_batch(self._rows.index(sequence), n)
            return self._trimmed(self._caches[sequence], n)
        except Exception as failure:
            return RemovalObservation(error=_words(failure))

    def _trimmed(self, caches: list[Any], n: int) -> RemovalObservation:
        holds = any(int(leaf.offset) for _, leaf in held.leaves(caches) if not held.is_state(leaf))
        asks = n and holds and release.asks_to_rewind()  # nothing is in the way of taking nothing away
        if asks and not self._library.can_trim_prompt_cache(caches):
            return RemovalObservation(refused="can_trim_prompt_cache says no")
        return RemovalObservation((self._library.trim_prompt_cache(caches, n),) * len(self._calls))

    def _rollback_in_batch(self, row: int, n: int) -> RemovalObservation:
        """The library trims all rows of a batch or none, so they leave it, one is trimmed, and they meet again."""
        apart = [self._row(number) for number in range(len(self._rows))]
        seen = self._trimmed(apart[row], n)
        if seen.refused is None:
            self._batch = self._merged(apart)
        return seen

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]:
        if sequence in self._rows:
            row = self._rows.index(sequence)
            leaves = [leaf for _, leaf in held.leaves(self._batch)]
            return tuple(_lengths_of_row(leaves[at], row) for at in self._calls)
        leaves = [leaf for _, leaf in held.leaves(self._caches[sequence])]
        return tuple(held.lengths_of(leaves[at]) for at in self._calls)

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        if sequence not in self._rows:
            leaves = [leaf for _, leaf in held.leaves(self._caches[sequence])]
            return tuple(held.rows_of(leaves[at]) for at in self._calls)
        row, leaves = self._rows.index(sequence), [leaf for _, leaf in held.leaves(self._batch)]
        read = [leaves[at] for at in self._calls]
        return tuple(held.no_rows(leaf) if held.is_empty(leaf) else held.rows_of(leaf.extract(row)) for leaf in read)

    def snapshot(self, sequence: int, slot: int) -> CopyObservation:
        return self._copy(lambda: self._slots.__setitem__(slot, copy.deepcopy(self._of(sequence))))

    def restore(self, sequence: int, slot: int) -> CopyObservation:
        if slot not in self._slots:
            return CopyObservation()
        return self._copy(lambda: self._replace(sequence, copy.deepcopy(self._slots[slot])))

    def fork(self, sequence: int, into: int) -> CopyObservation:
        return self._copy(lambda: self._replace(into, copy.deepcopy(self._of(sequence))))

    def save_and_load(self, sequence: int) -> CopyObservation:
        with scratch.make() as folder:
            path = str(folder / "caches.safetensors")
            caches = self._caches[sequence]
            if sequence not in self._rows and _nothing(caches) and not release.writes_nothing(self._library):
                return self.reset(sequence)

            def through_a_file() -> None:
                self._library.save_prompt_cache(path, self._of(sequence))
                caches = self._library.load_prompt_cache(path)
                mx.eval([cache.state for cache in caches if not held.is_empty(cache)])  # the file goes away
                self._replace(sequence, caches)

            return self._copy(through_a_file)

    def reset(self, sequence: int) -> CopyObservation:
        storage = quantised.storage_of(self._caches[sequence])

        def anew() -> None:
            caches = self._library.make_prompt_cache(self._model)
            if storage != "rows":
                quantised.quantise(caches, storage)
            self._replace(sequence, caches)

        return self._copy(anew)

    def quantise(self, sequence: int, storage: QuantisedStorage) -> CopyObservation:
        return self._copy(lambda: quantised.quantise(self._of(sequence), storage))

    def batch(self, rows: tuple[int, ...]) -> CopyObservation:
        return self._copy(lambda: self._gather(rows))

    def _gather(self, rows: tuple[int, ...]) -> None:
        """As ``BatchGenerator`` does it: extract who leaves, filter who stays, merge who joins, extend."""
        stay = [seq for seq in rows if seq in self._rows]
        join = [seq for seq in rows if seq not in self._rows]
        for seq in set(self._rows) - set(stay):
            self._caches[seq] = self._row(self._rows.index(seq))
        if rows and self._must_begin_anew(stay, join):
            self._batch = self._merged([self._row(self._rows.index(s)) if s in stay else self._caches[s] for s in rows])
            self._rows = tuple(rows)
            return
        batch = self._batch if stay else []
        order = [self._rows.index(seq) for seq in stay]
        if stay and order != list(range(len(self._rows))):
            for cache in batch:
                cache.filter(order)
        if join:
            joined = self._merged([self._caches[seq] for seq in join])
            for cache, more in zip(batch, joined, strict=bool(batch)):
                cache.extend(more)
            batch = batch or joined
        self._batch, self._rows = batch, tuple(rows)

    def _must_begin_anew(self, stay: Sequence[int], join: Sequence[int]) -> bool:
        """Would a batch without content be filtered or extended, or one be extended by nothing, by a release that
        cannot?"""
        nothing = (stay and _nothing(self._batch)) or (join and all(_nothing(self._caches[seq]) for seq in join))
        return bool(nothing) and not release.merges_nothing(self._library)

    def _merged(self, caches: Sequence[list[Any]]) -> list[Any]:
        """One batch of several prompt caches, as ``mlx_lm.generate`` merges them."""
        if all(map(_nothing, caches)) and not release.merges_nothing(self._library):
            return [release.batch_of_nothing(self._library, cache, len(caches)) for cache in caches[0]]
        return [layer[0].merge(list(layer)) for layer in zip(*caches, strict=True)]

    def _row(self, row: int) -> list[Any]:
        """The prompt cache of a row; a fresh one of a batch that has had no forward."""
        if _nothing(self._batch):
            return self._library.make_prompt_cache(self._model)
        return [cache.extract(row) for cache in self._batch]

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        lengths = [len(row) for row in tokens]
        padding = [max(lengths) - length for length in lengths]
        ids = mx.array([[*row, *(0,) * pad] for row, pad in zip(tokens, padding, strict=True)])
        leaves = [leaf for _, leaf in held.leaves(self._batch)]
        try:
            before = [[] if held.is_state(leaf) else [max(0, n) for n in leaf.offset.tolist()] for leaf in leaves]
            for cache in self._batch if any(padding) else ():
                cache.prepare(lengths=lengths, right_padding=padding)
        except Exception as failure:
            return tuple(ForwardObservation(tuple(row), None, error=_words(failure)) for row in tokens)
        logits, record, seconds, error = self._watched(ids, self._batch)
        calls = [
            in_order(call, leaves[at], before[at], max(lengths))
            for call, at in zip(record.attention(), self._calls, strict=False)
        ]
        if any(padding) and error is None:
            try:
                for cache in self._batch:
                    cache.finalize()
            except Exception as failure:
                error = _words(failure)
        return rows_of(tokens, logits, calls, record.positions(), seconds, error)

    def _of(self, sequence: int) -> list[Any]:
        if sequence in self._rows:
            raise RuntimeError("a sequence in a batch is not copied there")
        return self._caches[sequence]

    def _replace(self, sequence: int, caches: list[Any]) -> None:
        self._caches[sequence] = caches

    def _copy(self, act: Callable[[], Any]) -> CopyObservation:
        try:
            act()
        except quantised.CannotQuantise as refusal:
            return CopyObservation(refused=str(refusal))
        except Exception as failure:  # as in a forward
            return CopyObservation(error=_words(failure))
        return CopyObservation(len(self._calls))

    # What the library's caches cannot do, or is not asked of them yet; never called, since the target does not say that
    # it can (tests/targets/test_mlx_lm.py holds it to that).

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation:
        raise NotImplementedError("the caches of mlx-lm have no front trim")

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation:
        raise NotImplementedError("the caches of mlx-lm have no front trim")

    def memory(self, sequence: int) -> tuple[CacheMemory, ...]:
        raise NotImplementedError("the caches of mlx-lm say no size of a slot")

    def footprint(self) -> int:
        raise NotImplementedError("what keeps the caches of mlx-lm is this session")

    def watch_arguments(self) -> None:
        raise NotImplementedError("arrays that mlx-lm's models make are not watched")

    def arguments(self) -> ArgumentsObservation:
        raise NotImplementedError("arrays that mlx-lm's models make are not watched")


def _nothing(caches: Sequence[Any]) -> bool:
    """Has no cache of these had a forward?"""
    return all(held.is_empty(leaf) for _, leaf in held.leaves(caches))


def _lengths_of_row(cache: Any, row: int) -> CacheLengths:
    """What a batch cache says of a row."""
    if held.kind_of(cache) == "rotating" and not held.is_empty(cache):
        return held.lengths_of(cache.extract(row))
    offset, padding = int(cache.offset[row].item()), int(cache.left_padding[row].item())
    return CacheLengths(offset, 0, cache._idx - padding)


def _words(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
