"""Programs that run through ``mlx_lm.generate.BatchGenerator`` as a whole.

A sequence is a request, or the prompt cache of one that has left. What is put into the generator, and when, is the
program; how prompts are read, padded and cut, when caches are merged, extended, filtered and extracted, and who goes
forward with whom is the generator's. Every request has a sampler of ours, which draws the token that the program will
most likely feed next; where the program goes on otherwise (a chunk, a copy), the request leaves, and comes again with
its cache and the tokens as a new prompt. Sequences outside the batch have a generator each.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.operations import Owner
from harness.oracle import Expected, History
from harness.rows_of_a_batch import rows_of
from harness.target import (
    CacheLengths,
    CacheRows,
    Capability,
    CopyObservation,
    EngineGone,
    ForwardObservation,
    PromptInput,
    Session,
)
from harness.targets import mlx_lm_caches as held
from harness.targets import mlx_lm_release as release
from harness.targets.mlx_lm_calls import unpadded
from harness.targets.mlx_lm_free import cache_free
from harness.targets.mlx_lm_models import UnknownFamily, version
from harness.targets.mlx_lm_requests import Contradiction, Request, TrimsNothing, WatchedForward, WatchedModel
from harness.targets.mlx_lm_target import MlxLmTarget


@dataclass(frozen=True)
class Settings:
    """``prefill_step_size``: tokens of a prompt that go forward at once; ``max_tokens``: behind how many that a request
    fed itself it ends; ``batch_size``: how many requests are read, and how many generate, at the same time."""

    prefill_step_size: int
    max_tokens: int
    batch_size: int

    @property
    def whole(self) -> bool:
        """Is a prompt of any program read in one forward?"""
        return self.prefill_step_size > 1000

    @property
    def limits(self) -> tuple[str, ...]:
        """What a run with these settings cannot show."""
        always = "the generator takes no token of a request back, and its prompts are read by themselves"
        return (
            (always,) if self.whole else (always, "masks and positions of prompts in pieces are seen in their outputs")
        )


#: What stands behind the @ of a name: one reads prompts whole, and its requests leave when they are removed; the other
#: reads them in pieces, its requests end by themselves, and a third waits for one of two to end or to leave.
SETTINGS = {"batch-generator": Settings(4096, 1 << 30, 8), "batch-generator-in-pieces": Settings(3, 2, 2)}

_LACKS = frozenset({Capability.ROLLBACK, Capability.SAVE_LOAD, Capability.QUANTISE})
_SEEN = frozenset({Capability.ATTENTION, Capability.ATTENTION_VALUES, Capability.POSITIONS})


@dataclasses.dataclass(frozen=True)
class GeneratorTarget(MlxLmTarget):
    """A model of mlx-lm in its own ``BatchGenerator``; ``caches``: a name of SETTINGS, and a bound behind it."""

    @property
    def settings(self) -> Settings:
        return SETTINGS[self.caches.partition("@")[0]]

    def check(self) -> None:
        """UnknownFamily where the generator cannot run this model, or this release has none."""
        named = f"mlx_lm:{self.model_type}@{self.caches} cannot be judged"
        kind = getattr(importlib.import_module("mlx_lm.generate"), "BatchGenerator", None)
        if kind is None:
            raise UnknownFamily(f"{named}: mlx-lm {version()} has no BatchGenerator")
        if self.max_kv_size is not None and "max_kv_size" not in inspect.signature(kind).parameters:
            raise UnknownFamily(f"{named}: the BatchGenerator of mlx-lm {version()} has no max_kv_size")
        if not release.batches(self._library.make_prompt_cache(self._model)):
            raise UnknownFamily(f"{named}: BatchGenerator merges caches, which not all of this model's can")

    @functools.cached_property
    def capabilities(self) -> frozenset[Capability]:
        """A prompt read in pieces is several forwards of the model, whose calls cannot be told as those of one."""
        told = super().capabilities | {Capability.BATCH, Capability.UNPADDED}
        return told - _LACKS - (frozenset() if self.settings.whole else _SEEN)

    def open(self, owners: tuple[Owner, ...]) -> Session:
        make = functools.partial(self._library.make_prompt_cache, self._model)
        settings, calls = self.settings, [at for _, at in self._calls]
        return GeneratorSession(self._model, make, calls, owners, settings, self.vocab_size, self.max_kv_size)

    def cache_free(self, history: History) -> Expected:
        return cache_free(history, self._alone if self.max_kv_size is None else self._with_masks)


class GeneratorSession(TrimsNothing):
    """``calls``: which leaf of a prompt cache every attention call of a forward reads; ``max_kv_size``: what the
    generator is asked for, if it is, beside ``make_caches``, which makes the same ones."""

    def __init__(
        self,
        model: Any,
        make_caches: Callable[[], list[Any]],
        calls: Sequence[int],
        owners: tuple[Owner, ...],
        settings: Settings,
        vocab_size: int,
        max_kv_size: int | None = None,
    ) -> None:
        self._model, self._make_caches, self._calls = WatchedModel(model, calls), make_caches, tuple(calls)
        self._settings = settings
        self._bound = {} if max_kv_size is None else {"max_kv_size": max_kv_size}
        self._requests = [Request(number, vocab_size) for number in range(len(owners))]
        self._alone = [self._generator() for _ in owners]
        self._together = self._generator()
        self._rows: tuple[int, ...] = ()
        self._slots: dict[int, tuple[list[Any] | None, list[int]]] = {}

    def _generator(self) -> Any:
        kind, size = importlib.import_module("mlx_lm.generate").BatchGenerator, self._settings.batch_size
        sizes = {"prefill_batch_size": size, "completion_batch_size": size}
        return kind(self._model, prefill_step_size=self._settings.prefill_step_size, **sizes, **self._bound)

    def tell_attention(self) -> None:
        self._model.told = True

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        return self._forward(self._alone[sequence], [self._requests[sequence]], [tokens])[0]

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        return self._forward(self._together, [self._requests[row] for row in self._rows], tokens)

    def _forward(
        self, generator: Any, requests: Sequence[Request], tokens: Sequence[Sequence[int]]
    ) -> tuple[ForwardObservation, ...]:
        started = time.perf_counter()
        try:
            self._feed(generator, requests, tokens)
            pieces = self._until_read(generator, requests, tokens)
        except Exception as failure:  # whatever the library raises is an observation, and the judges decide
            return rows_of(tokens, None, (), (), time.perf_counter() - started, _words(failure))
        return tuple(self._whole(row, each) for row, each in zip(tokens, pieces, strict=True))

    def _feed(self, generator: Any, requests: Sequence[Request], tokens: Sequence[Sequence[int]]) -> None:
        """See to it that requests go on with these tokens: they are what a request has in hand, or it comes with them
        as a prompt. Behind several the token that is due next stands as well, and waits there for its forward."""
        coming, prompts = [], []
        for request, row in zip(requests, tokens, strict=True):
            in_hand = request.generator is generator and list(row) == [request.due]
            if not in_hand:
                request.leave()
            request.count += len(row)
            request.due = request.upcoming()
            if not in_hand:
                coming.append(request)
                prompts.append(self._segments(request, row))
        if not coming:
            return
        uids = generator.insert_segments(
            prompts,
            [self._settings.max_tokens] * len(coming),
            caches=[request.caches for request in coming],
            all_tokens=[list(request.fed) for request in coming],
            samplers=[request.sample for request in coming],
            logits_processors=[[request.process] for request in coming],
        )
        for request, uid in zip(coming, uids, strict=True):
            request.enter(generator, uid)

    def _segments(self, request: Request, tokens: Sequence[int]) -> list[list[int]]:
        """The prompt that these tokens are, in pieces between which the generator stops if it reads no prompt whole."""
        if len(tokens) == 1:
            return [list(tokens)]
        cut = 0 if self._settings.whole else 1 + request.count % 5
        return [list(tokens[:cut]), list(tokens[cut:]), [request.due]]

    def _until_read(
        self, generator: Any, requests: Sequence[Request], tokens: Sequence[Sequence[int]]
    ) -> list[list[ForwardObservation]]:
        """Step the generator until all tokens have been forward; of every request what its forwards were. Who is done
        while another's prompt is still being read would run ahead of the program, and leaves."""
        by_uid = {request.uid: request for request in requests}
        left = {request.uid: list(row) for request, row in zip(requests, tokens, strict=True)}
        pieces: dict[int, list[ForwardObservation]] = {request.uid: [] for request in requests}
        while any(left.values()):
            self._model.seen.clear()
            drawn = {uid: request.drawn_from for uid, request in by_uid.items()}
            prompts, generated = generator.next()
            if not prompts and not generated:
                raise Contradiction(f"the generator has nothing to do; it was given {left}, by request")
            for group, forward in zip(_groups(prompts, generated, by_uid), self._model.seen, strict=True):
                rows = [left[uid][:count] for uid, count in group]
                for (uid, count), row, seen in zip(group, rows, self._taken_apart(forward, rows), strict=True):
                    pieces[uid].append(by_uid[uid].as_handed_out(seen))
                    by_uid[uid].fed += row
                    del left[uid][:count]
            for response in generated:
                by_uid[response.uid].heed(response, drawn[response.uid])
            if any(left.values()):
                for uid in [uid for uid, row in left.items() if not row]:
                    by_uid[uid].leave()
        return [pieces[uid] for uid in left]

    def _taken_apart(self, forward: WatchedForward, rows: Sequence[Sequence[int]]) -> Sequence[ForwardObservation]:
        """What every row saw of a forward, without the slots that are its padding."""
        if not self._settings.whole:
            return rows_of(rows, forward.logits, (), (), forward.seconds, None)
        apart = rows_of(rows, forward.logits, forward.attention, forward.positions, forward.seconds, None)
        made = []
        for number, (row, seen) in enumerate(zip(rows, apart, strict=True)):
            behind = forward.width - len(row)
            told = [
                unpadded(call, front[number], behind)
                for call, front in zip(seen.attention, forward.fronts, strict=False)
            ]
            made.append(dataclasses.replace(seen, attention=tuple(told)))
        return made

    def _whole(self, tokens: Sequence[int], pieces: Sequence[ForwardObservation]) -> ForwardObservation:
        """The forwards of one row as one."""
        logits = np.concatenate([piece.logits for piece in pieces if piece.logits is not None])
        calls = (pieces[0].attention, pieces[0].positions) if self._settings.whole else ((), ())
        return ForwardObservation(tuple(tokens), logits, *calls, sum(piece.seconds for piece in pieces))

    def _leaves(self, sequence: int) -> list[Any]:
        """Of its caches those that attention reads, by call. EngineGone where they cannot be extracted."""
        try:
            caches = self._requests[sequence].copy_of_caches()
            leaves = [leaf for _, leaf in held.leaves(self._make_caches() if caches is None else caches)]
        except Exception as failure:
            raise EngineGone(_words(failure)) from failure
        return [leaves[at] for at in self._calls]

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]:
        return tuple(map(held.lengths_of, self._leaves(sequence)))

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        return tuple(map(held.rows_of, self._leaves(sequence)))

    def batch(self, rows: tuple[int, ...]) -> CopyObservation:
        """Who joins or leaves is removed from where it is; it comes again with the tokens of its next forward."""

        def gather() -> None:
            for sequence in {*self._rows} ^ {*rows}:
                self._requests[sequence].leave()
            self._rows = tuple(rows)

        return self._done(gather)

    def snapshot(self, sequence: int, slot: int) -> CopyObservation:
        request = self._requests[sequence]
        return self._done(lambda: self._slots.__setitem__(slot, (request.copy_of_caches(), list(request.fed))))

    def restore(self, sequence: int, slot: int) -> CopyObservation:
        if slot not in self._slots:
            return CopyObservation()
        return self._done(lambda: self._requests[sequence].replace(*self._slots[slot]))

    def fork(self, sequence: int, into: int) -> CopyObservation:
        source, fork = self._requests[sequence], self._requests[into]
        return self._done(lambda: fork.replace(source.copy_of_caches(), source.fed))

    def reset(self, sequence: int) -> CopyObservation:
        return self._done(lambda: self._requests[sequence].replace(None, ()))

    def _done(self, act: Callable[[], Any]) -> CopyObservation:
        try:
            act()
        except Exception as failure:  # as in a forward
            return CopyObservation(error=_words(failure))
        return CopyObservation(len(self._calls))


def _groups(
    prompts: Sequence[Any], generated: Sequence[Any], by_uid: dict[int, Request]
) -> list[list[tuple[int, int]]]:
    """The requests of every forward that a step of the generator made, by row, in its order, and of how many tokens it
    was to each: those that generate, those whose prompt ends, and those whose prompt is read on."""
    one = [(response.uid, 1) for response in generated]
    ends = [(response.uid, 1) for response in prompts if response.end_of_prompt]
    reads = [response for response in prompts if not response.end_of_prompt]
    more = [(response.uid, by_uid[response.uid].read_on(response.progress[0])) for response in reads]
    return [group for group in (one, ends, more) if group]


def _words(failure: Exception) -> str:
    return f"{type(failure).__name__}: {failure}"
