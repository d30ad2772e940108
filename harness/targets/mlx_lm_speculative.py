"""Programs whose forwards are speculative generation as a whole: ``mlx_lm.generate.speculative_generate_step``.

The tokens of a forward are a prompt (the first half of them) and what is generated behind it. A draft model of ours,
which has no caches, proposes them, or something else; a sampler of ours decides for them. So every forward is several
rounds of drafts, of which some are accepted in part and the rest taken back; behind it the caches must hold its tokens
alone.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from harness.operations import Owner
from harness.oracle import Expected, History
from harness.target import Capability, ForwardObservation, PromptInput, Session
from harness.targets.mlx_lm_free import cache_free
from harness.targets.mlx_lm_models import UnknownFamily
from harness.targets.mlx_lm_requests import Contradiction
from harness.targets.mlx_lm_session import LibrarySession
from harness.targets.mlx_lm_target import MlxLmTarget

SPECULATIVE = "speculative"
LIMITS = (
    "a forward is several rounds of speculative generation, whose masks and positions show in its logits alone",
    "what a draft model keeps in caches of its own changes no token, and is not judged",
)
DRAFTS = 3
"""Tokens that are proposed in a round."""
_LACKS = frozenset(
    {
        Capability.ATTENTION,
        Capability.ATTENTION_VALUES,
        Capability.POSITIONS,
        Capability.BATCH,
        Capability.QUANTISE,
    }
)


@dataclass(frozen=True)
class SpeculativeTarget(MlxLmTarget):
    """A model of mlx-lm that is always asked through speculative generation."""

    @functools.cached_property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities - _LACKS

    def check(self) -> None:
        """UnknownFamily where the library refuses to speculate."""
        if not self._library.can_trim_prompt_cache(self._library.make_prompt_cache(self._model)):
            named = f"mlx_lm:{self.model_type}@{self.caches} cannot be judged"
            raise UnknownFamily(f"{named}: speculative generation refuses caches that cannot be trimmed")

    def open(self, owners: tuple[Owner, ...]) -> Session:
        return SpeculativeSession(self._model, self._library, [at for _, at in self._calls], owners, self.vocab_size)

    def cache_free(self, history: History) -> Expected:
        return cache_free(history, self._alone)


class _Script:
    """What is to be generated behind the tokens that are there: ``wanted``, and then anything. ``number``: of the first
    of them, by which some are not proposed."""

    def __init__(self, model: Any, wanted: Sequence[int], number: int, vocab_size: int) -> None:
        self._model, self._wanted, self._number, self._vocab = model, list(wanted), number, vocab_size
        self.yielded = 0
        self._proposed = 0
        self._drafts = False  # who went forward last
        self.forwards: list[np.ndarray[Any, Any]] = []
        self.rows: np.ndarray[Any, Any] | None = None
        self.layers: tuple[Any, ...] = ()  # of the draft model, which has none

    def token(self, at: int) -> int:
        return self._wanted[at] if at < len(self._wanted) else 0

    def model(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """The model, under watch."""
        out: mx.array = self._model(ids, cache=cache)
        self.forwards.append(np.array(out[0].astype(mx.float32)))
        self._drafts = False
        return out

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        """The draft model: what is proposed next. Behind what is wanted never what will be sampled."""
        at = self.yielded + self._proposed
        wrong = at >= len(self._wanted) or ((self._number + at) * 0x9E3779B1 >> 7) % 4 == 0
        self._proposed += 1
        self._drafts = True
        proposed = mx.array([(self.token(at) + wrong) % self._vocab])
        out: mx.array = 50.0 * (mx.arange(self._vocab)[None, None] == proposed).astype(mx.float32)
        return mx.broadcast_to(out, (1, ids.shape[1], self._vocab))

    def sample(self, logprobs: mx.array) -> mx.array:
        """The sampler of both, [n, vocab] -> [n]."""
        if self._drafts:
            return mx.argmax(logprobs, axis=-1)
        self.rows, self._proposed = np.array(logprobs.astype(mx.float32)), 0
        return mx.array([self.token(self.yielded + row) for row in range(len(self.rows))], mx.uint32)

    def check(self, token: int, logprobs: np.ndarray[Any, Any], row: int) -> None:
        """What is yielded next is what was sampled in this row. Contradiction."""
        due = self.token(self.yielded)
        if token != due:
            raise Contradiction(f"token {token} was generated where {due} was sampled")
        if self.rows is None or not np.array_equal(logprobs, self.rows[row], equal_nan=True):
            raise Contradiction(f"token {token} comes with logprobs that it was not sampled from")


class _Under:
    """A model whose forwards go to a script; everything else of it is its own."""

    def __init__(self, model: Any, script: _Script) -> None:
        self._model, self._script = model, script

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        return self._script.model(ids, cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class SpeculativeSession(LibrarySession):
    """The same, but for its forwards. A sequence whose caches have turned, on which the library refuses to speculate,
    is read plainly, as a server must do it."""

    def __init__(
        self, model: Any, library: Any, calls: Sequence[int], owners: tuple[Owner, ...], vocab_size: int
    ) -> None:
        super().__init__(model, library, calls, owners)
        self._vocab_size = vocab_size
        self._numbers = [0] * len(owners)

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        caches, started = self._caches[sequence], time.perf_counter()
        number = self._numbers[sequence]
        self._numbers[sequence] += len(tokens)
        logits, error = None, None
        try:
            if self._library.can_trim_prompt_cache(caches):
                logits = self._speculated(caches, list(tokens), number)
            else:
                logits = np.array(self._model(mx.array([list(tokens)]), cache=caches)[0].astype(mx.float32))
        except Exception as failure:  # whatever the library raises is an observation, and the judges decide
            error = f"{type(failure).__name__}: {failure}"
        return ForwardObservation(tuple(tokens), logits, seconds=time.perf_counter() - started, error=error)

    def _speculated(self, caches: list[Any], tokens: list[int], number: int) -> np.ndarray[Any, Any]:
        """Logits [l, vocab]: those that each token got in the round in which it stayed."""
        half = 1 + (len(tokens) - 1) // 2
        wanted = tokens[half:]
        script = _Script(self._model, wanted, number, self._vocab_size)
        closes = number % 2 == 1  # the caller leaves, as at the end of a text; else the number of tokens is bounded
        steps = importlib.import_module("mlx_lm.generate").speculative_generate_step(
            mx.array(tokens[:half]),
            _Under(self._model, script),
            script,
            num_draft_tokens=DRAFTS,
            max_tokens=len(wanted) + (DRAFTS + 1 if closes else 1),
            sampler=script.sample,
            prompt_cache=caches,
            prefill_step_size=3,
        )
        kept: list[np.ndarray[Any, Any]] = []
        row = 0
        for token, logprobs, accepted in steps:
            script.check(int(token), np.array(logprobs.astype(mx.float32)), row)
            script.yielded += 1
            row += 1
            if not accepted:  # its round is over, whose rows are of the token before it and of those accepted
                kept.append(script.forwards[-1][:row])
                row = 0
            elif closes and number % 3 == 1 and script.yielded == len(wanted):  # in the middle of a round
                kept.append(script.forwards[-1][: row + 1])
                break
            if closes and script.yielded > len(wanted):
                break
        steps.close()
        return np.concatenate([*_prompt_rows(script, half), *kept])


def _prompt_rows(script: _Script, half: int) -> list[np.ndarray[Any, Any]]:
    """Of the prompt but its last token, which the first round begins with."""
    read: list[np.ndarray[Any, Any]] = []
    while sum(map(len, read)) < half - 1:
        read.append(script.forwards[len(read)])
    return read
