"""A session of the reference target: one pool on one model, and the probe that watches its forwards."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from harness import scratch
from harness.operations import EnforceMaxKvSize, Owner
from harness.probe import PositionHook, Probe, Record
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
from harness.targets.footprint import footprint
from harness.targets.given import given_to
from harness.targets.watch import Watch
from harness.targets.witnesses import images_of
from reference_models import rope
from reference_models.engine import BatchPool, CannotQuantise, CannotTrim, KVCache, MaskPolicy, enforce_max_kv_size
from reference_models.prompt import Images, Prompt

#: Where our models hand out absolute positions other than through ``mx.fast.rope``.
HOOKS = (
    PositionHook(rope, "mrope_angles", "mrope", lambda position_ids, *_, **__: position_ids),
    PositionHook(rope, "absolute_query_scale", "query_scale", lambda positions, *_, **__: positions),
)


_Array = np.ndarray[Any, Any]


@functools.lru_cache(maxsize=1)
def _probe() -> Probe:
    return Probe(HOOKS)


class ReferenceSession:
    """One CachePool with the caches of every sequence (as ``make_caches`` makes them), and their prompts."""

    def __init__(
        self,
        model: Any,
        policy: MaskPolicy,
        make_caches: Callable[[], list[KVCache]],
        owners: tuple[Owner, ...],
        widths: Sequence[tuple[int, int]] = (),
    ) -> None:
        self._widths = widths  # of the rows of each cache
        self._model = model
        self._policy = policy
        self._probe = _probe()
        self._told = False
        self._watch: Watch | None = None
        self._pool = BatchPool()
        self._ids = [self._pool.open(make_caches(), owner) for owner in owners]
        self._ruled = [type(cache).rule is not KVCache.rule for cache in self._pool.forward_caches(self._ids[0])]
        self._prompts: list[Prompt | None] = [None] * len(owners)  # never written to: copies may share them
        self._kept_prompts: dict[int, Prompt | None] = {}

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        caches = self._pool.forward_caches(self._ids[sequence])
        ids = mx.array([list(tokens)], dtype=mx.int32)
        if prompt is not None:  # outside the probe: the attention of a vision tower is not that of the cache
            try:
                self._prompts[sequence] = self._read(mx.array([prompt.tokens], mx.int32), images_of(prompt))
            except Exception as failure:  # as below
                return ForwardObservation(tuple(tokens), None, error=f"{type(failure).__name__}: {failure}")
        read = {} if (kept := self._prompts[sequence]) is None else {"prompt": kept}
        with given_to(_quantised(caches)) as given:
            logits, record, seconds, error = self._watched(ids, caches, read)
        logits = None if logits is None else logits[0]
        seen = ForwardObservation(tuple(tokens), logits, record.attention(), record.positions(), seconds, error)
        return replace(seen, given=_rows_given(given, 0, len(tokens))) if given and error is None else seen

    def _read(self, tokens: mx.array, images: Images) -> Prompt:
        with self._watch.over_images(tokens, images) if self._watch else nullcontext():
            prompt: Prompt = self._model.read(tokens, images)
        return prompt

    def _watched(
        self, ids: mx.array, caches: Sequence[Any], read: dict[str, Any]
    ) -> tuple[np.ndarray[Any, Any] | None, Record, float, str | None]:
        """Logits ``[B, l, vocab]`` (None if it raised), what the probe saw, seconds, and the error."""
        logits, error = None, None
        watch = self._watch.over(ids, caches, read) if self._watch else nullcontext()
        with watch, self._probe.watching(self._told) as record:
            started = time.perf_counter()
            try:
                out = self._model(ids, list(caches), self._policy, **read)
                out = out.astype(mx.float32)
                mx.eval(out, record.arrays)
                logits = np.array(out)
            except Exception as failure:  # whatever a model raises is an observation, and the judges decide
                error = f"{type(failure).__name__}: {failure}"
            seconds = time.perf_counter() - started
        return logits, record, seconds, error

    def tell_attention(self) -> None:
        self._told = True

    def watch_arguments(self) -> None:
        self._watch = Watch()

    def arguments(self) -> ArgumentsObservation:
        return ArgumentsObservation() if self._watch is None else self._watch.told()

    def batch(self, rows: tuple[int, ...]) -> CopyObservation:
        return self._copy(lambda: self._pool.batch([self._ids[row] for row in rows]))

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        caches, lengths = self._pool.batch_caches, [len(row) for row in tokens]
        longest = max(lengths)
        ids = mx.array([[*row, *(0,) * (longest - len(row))] for row in tokens], dtype=mx.int32)
        try:
            for cache in caches if min(lengths) < longest else ():
                cache.prepare(lengths)
        except Exception as failure:  # as in a forward
            why = f"{type(failure).__name__}: {failure}"
            return tuple(ForwardObservation(tuple(row), None, error=why) for row in tokens)
        prompts = [self._prompts[self._ids.index(seq)] for seq in self._pool.rows]
        read: dict[str, Any] = {"prompt": prompts} if any(prompts) else {}
        with given_to(_quantised(caches)) as given:
            logits, record, seconds, error = self._watched(ids, caches, read)
        seen = rows_of(tokens, logits, record.attention(), record.positions(), seconds, error)
        if not given or error is not None:
            return seen
        return tuple(replace(each, given=_rows_given(given, row, lengths[row])) for row, each in enumerate(seen))

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation:
        return self._removal(lambda: self._pool.trim_front(self._ids[sequence], n, keep).removed)

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        def act() -> Sequence[int]:
            removed = self._pool.rollback(self._ids[sequence], n).removed
            prompt, offset = self._prompts[sequence], self._pool.lengths_of(self._ids[sequence])[0][0]
            if any(removed) and prompt is not None and offset < prompt.length:
                self._prompts[sequence] = prompt.cut(offset) if offset else None
            return removed

        return self._removal(act)

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation:
        sequence = self._ids[rule.sequence]
        return self._removal(
            lambda: (
                enforce_max_kv_size(
                    self._pool, sequence, rule.limit, rule.generation, rule.keep, rule.n_discard
                ).trim.removed
            )
        )

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]:
        return tuple(CacheLengths(*lengths) for lengths in self._pool.lengths_of(self._ids[sequence]))

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        held = [[_floats(side) for side in sides] for sides in self._pool.rows_of(self._ids[sequence])]
        mx.eval(held)  # at once, which is cheaper than one by one
        rows = [tuple(map(np.array, sides)) for sides in held]
        places = self._pool.positions_of(self._ids[sequence])
        return tuple(
            _by_position(keys, values, where) if ruled else CacheRows(keys, values, tuple(np.array(where).tolist()))
            for ruled, (keys, values), where in zip(self._ruled, rows, places, strict=True)
        )

    def memory(self, sequence: int) -> tuple[CacheMemory, ...]:
        return tuple(CacheMemory(held, slot) for held, slot in self._pool.memory_of(self._ids[sequence]))

    def footprint(self) -> int:
        return footprint(self._pool)

    def snapshot(self, sequence: int, slot: int) -> CopyObservation:
        seen = self._copy(lambda: self._pool.snapshot(self._ids[sequence], slot))
        if seen.caches:
            self._kept_prompts[slot] = self._prompts[sequence]
        return seen

    def restore(self, sequence: int, slot: int) -> CopyObservation:
        seen = self._copy(lambda: self._pool.restore(self._ids[sequence], slot))
        if seen.caches:
            self._prompts[sequence] = self._kept_prompts[slot]
        return seen

    def fork(self, sequence: int, into: int) -> CopyObservation:
        seen = self._copy(lambda: self._pool.fork(self._ids[sequence], self._ids[into]))
        if seen.caches:
            self._prompts[into] = self._prompts[sequence]
        return seen

    def save_and_load(self, sequence: int) -> CopyObservation:
        with scratch.make() as folder:
            path = folder / "caches.safetensors"
            return self._copy(lambda: self._pool.save_and_load(self._ids[sequence], path))

    def reset(self, sequence: int) -> CopyObservation:
        seen = self._copy(lambda: self._pool.reset(self._ids[sequence]))
        if seen.caches:
            self._prompts[sequence] = None
        return seen

    def quantise(self, sequence: int, storage: QuantisedStorage) -> CopyObservation:
        return self._copy(lambda: self._pool.to_storage(self._ids[sequence], storage, self._widths))

    @staticmethod
    def _copy(act: Callable[[], int]) -> CopyObservation:
        try:
            return CopyObservation(act())
        except CannotQuantise as refusal:
            return CopyObservation(refused=str(refusal))
        except Exception as failure:  # as in forward
            return CopyObservation(error=f"{type(failure).__name__}: {failure}")

    @staticmethod
    def _removal(act: Any) -> RemovalObservation:
        try:
            return RemovalObservation(tuple(act()))
        except CannotTrim as refusal:
            return RemovalObservation(refused=str(refusal))
        except Exception as failure:  # as in forward
            return RemovalObservation(error=f"{type(failure).__name__}: {failure}")


def _quantised(caches: Sequence[Any]) -> list[Any]:
    return [cache for cache in caches if cache.storage != "rows"]


def _rows_given(given: Sequence[tuple[mx.array, mx.array]], row: int, count: int) -> tuple[CacheRows, ...]:
    """Of one row of the batch, without what pads it at the right."""
    mine = [tuple(_floats(side[row : row + 1, :, :count]) for side in sides) for sides in given]
    mx.eval(mine)
    return tuple(CacheRows(np.array(keys), np.array(values)) for keys, values in mine)


def _by_position(keys: _Array, values: _Array, where: mx.array) -> CacheRows:
    """Of a cache with a rule: the slots of a ring say nothing of the order."""
    positions = np.array(where)
    order = np.argsort(positions, kind="stable")
    return CacheRows(keys[:, :, order], values[:, :, order], tuple(positions[order].tolist()))


def _floats(array: mx.array | None) -> mx.array:
    """float32 holds every float16 and bfloat16 value, so no difference is lost. Nothing held: no row."""
    return mx.zeros((1, 1, 0, 0)) if array is None else array.astype(mx.float32)
