"""The worker's side of the wire, for any target of this package."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from harness.capability import Capability
from harness.operations import EnforceMaxKvSize, OperationError
from harness.oracle import History
from harness.target import ForwardObservation, PromptInput, Session, Target
from harness.wire.codec import CodecError, decode, encode
from harness.wire.process import FOLDER
from harness.wire.prompts import wrong_with
from harness.wire.protocol import (
    CAPABILITIES,
    MESSAGES,
    VERSION,
    BatchAnswer,
    CacheFreeAnswer,
    Description,
    ForwardAnswer,
    NoAnswer,
    Policy,
    TellingAnswer,
    line_of,
    message_of,
)


class BadRequest(Exception):
    """A request that cannot be answered; the message says why, and the worker goes on."""


class Server:
    """Answers requests about one target. Without other means it offers the target's mask policy alone; with the
    capability COUNTERPART its counterpart's as well."""

    def __init__(self, target: Target, version: str = "") -> None:
        self._version = version
        other = target.counterpart() if Capability.COUNTERPART in target.capabilities else None
        self._targets = {_policy(each): each for each in (target, other) if each is not None}
        self._target = target
        self._session: Session | None = None
        self._sequences = 0
        self._prompts: dict[int, PromptInput] = {}  # of sequences whose next forward reads one

    def answer(self, line: bytes) -> bytes:
        """The line that answers a line."""
        number = -1
        try:
            request = message_of(line)
            number = request.pop("id")
            body = self._answer(request)
        except (BadRequest, CodecError) as error:
            body = {"bad_request": str(error)}
        except Exception as error:  # a misuse of the session: the harness is told, and decides
            body = {"bad_request": f"{type(error).__name__}: {error}"}
        return line_of({"id": number, **body})

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do, tell = request.pop("do", None), request.pop("tell", False)
        if not isinstance(do, str) or do not in MESSAGES:
            raise BadRequest(f"there is no message {do!r:.60}")
        fields, _, needed = MESSAGES[do]
        if set(request) != set(fields):
            raise BadRequest(f"{do!r} has the fields {', '.join(fields) or 'none'}, not {', '.join(request) or 'none'}")
        if needed is not None and needed not in self._target.capabilities:
            raise BadRequest(f"{do!r} needs the capability {needed.name.lower()!r}")
        given = {name: decode(kind, request[name], f"{do}.{name}") for name, kind in fields.items()}
        own: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "open": self._open,
            "cache_free": self._cache_free,
            "cache_free_of_prompts": self._cache_free_of_prompts,
        }
        said = own[do](**given) if do in own else self._operation(do, given)
        body: dict[str, Any] = encode(said)
        return body | ({"told": encode(self._told())} if tell or do == "tell" else {})

    def _hello(self, protocol: int) -> Description:
        if protocol != VERSION:
            raise BadRequest(f"this worker speaks version {VERSION} of the protocol, not {protocol}")
        target = self._target
        names = [name for name, capability in CAPABILITIES.items() if capability in target.capabilities]
        return Description(
            protocol=VERSION,
            family=target.identity.family,
            vocab_size=target.vocab_size,
            attention_layers=target.attention_layers,
            capabilities=tuple(names),
            variant=target.identity.variant,
            windows=target.windows,
            rules=target.rules,
            policies=tuple(self._targets),
            storage=target.identity.storage,
            version=self._version,
            images=target.images,
        )

    def _open(self, owners: Any, policy: Policy, attention: bool, arguments: bool) -> NoAnswer:
        if policy not in self._targets:
            raise BadRequest(f"this worker has the policy {', '.join(self._targets)}, not {policy!r:.40}")
        if not owners:
            raise BadRequest("a session has at least one sequence")
        self._session, self._sequences = self._targets[policy].open(owners), len(owners)
        self._prompts = {}
        if attention:
            self._session.tell_attention()
        if arguments:
            self._session.watch_arguments()
        return NoAnswer()

    def _operation(self, do: str, given: dict[str, Any]) -> Any:
        session = self._opened
        rows = given.get("rows", ())
        for sequence in (*rows, *(given[name] for name in ("sequence", "into") if name in given)):
            if not 0 <= sequence < self._sequences:
                raise BadRequest(f"there is no sequence {sequence}, the session has {self._sequences}")
        everything = [given.get("tokens", ())] if do == "forward" else given.get("tokens", ())
        for tokens in everything:
            if not tokens or not all(0 <= token < self._target.vocab_size for token in tokens):
                raise BadRequest(f"tokens must be at least one, each from 0 to {self._target.vocab_size - 1}")
        if do == "tell":
            return NoAnswer()
        if do == "prompt":
            return self._hear(given["sequence"], given["prompt"])
        if do == "forward":
            return _without_tokens(session.forward(given["sequence"], given["tokens"], self._prompt_of(**given)))
        if do == "enforce":
            try:
                return session.enforce(EnforceMaxKvSize(**given))
            except OperationError as error:
                raise BadRequest(str(error)) from error
        seen = getattr(session, do)(*given.values())
        return BatchAnswer(tuple(map(_without_tokens, seen))) if do == "forward_batch" else seen

    def _hear(self, sequence: int, prompt: PromptInput) -> NoAnswer:
        if wrong := self._wrong(prompt):
            raise BadRequest(f"the prompt: {wrong}")
        self._prompts[sequence] = prompt
        return NoAnswer()

    def _wrong(self, prompt: PromptInput) -> str | None:
        images = self._target.images
        return "no images are read here" if images is None else wrong_with(prompt, images, self._target.vocab_size)

    def _prompt_of(self, sequence: int, tokens: tuple[int, ...]) -> PromptInput | None:
        """The one that a forward of these tokens begins to read, or reads with what comes behind it."""
        prompt = self._prompts.pop(sequence, None)
        if prompt is not None and tokens[: len(prompt.tokens)] != prompt.tokens[: len(tokens)]:
            raise BadRequest("the tokens of a forward behind a prompt are the first of the prompt")
        return prompt

    @property
    def _opened(self) -> Session:
        if self._session is None:
            raise BadRequest("no session is open")
        return self._session

    def _told(self) -> tuple[TellingAnswer, ...]:
        session, able = self._opened, self._target.capabilities
        lengths, rows, memory = (can in able for can in (Capability.LENGTHS, Capability.ROWS, Capability.BYTES))
        return tuple(
            TellingAnswer(
                session.lengths(each) if lengths else (),
                session.rows(each) if rows else (),
                session.memory(each) if memory else (),
            )
            for each in range(self._sequences)
        )

    def _cache_free(self, tokens: Any, positions: Any, visible: Any) -> CacheFreeAnswer:
        text = np.full(tokens.shape, -1)
        return self._cache_free_of_prompts(tokens, positions, visible, np.stack([positions] * 3), text, ())

    def _cache_free_of_prompts(
        self, tokens: Any, positions: Any, visible: Any, places: Any, prompt_of: Any, prompts: tuple[PromptInput, ...]
    ) -> CacheFreeAnswer:
        count = tokens.size
        one, two, three = (count,), (count, count), (3, count)
        if (tokens.shape, positions.shape, prompt_of.shape) != (one,) * 3 or visible.shape != two or not count:
            raise BadRequest("a forward without a cache takes tokens [S], positions [S] and visible [S, S]")
        if places.shape != three or not ((prompt_of >= -1) & (prompt_of < len(prompts))).all():
            raise BadRequest("places are [3, S], and prompt_of [S] numbers of prompts, -1 for none")
        if wrong := next(filter(None, map(self._wrong, prompts)), None):
            raise BadRequest(f"a prompt: {wrong}")
        storages = np.full(count, self._target.row_storage)
        history = History(tokens, positions, places, visible, prompts, prompt_of, storages, np.arange(count))
        try:
            said = self._target.cache_free(history)
        except Exception as failure:  # as in a session: what a model raises is an observation
            return CacheFreeAnswer(error=f"{type(failure).__name__}: {failure}")
        choice, rounding = said.choice_gap, said.rounding_gap
        if choice is None and rounding is None and Capability.WITNESS in self._target.capabilities:
            witness = self._target.witness(history)  # which knows where rounding alone decides
            choice, rounding = witness.choice_gap, witness.rounding_gap
        return CacheFreeAnswer(said.logits, choice, rounding, said.dtype)


def _policy(target: Target) -> Policy:
    """Of a target whose library makes its own masks: they should be right, so "live"."""
    return "offset" if target.identity.policy == "offset" else "live"


def _without_tokens(seen: ForwardObservation) -> ForwardAnswer:
    return ForwardAnswer(seen.logits, seen.attention, seen.positions, seen.seconds, seen.error)


def serve(target: Target, version: str = "") -> None:
    """Answer requests on stdin until it ends; ``version``: of the engine, for the report.

    From now on whatever prints to stdout prints to stderr.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        answer_lines(Server(target, version), sys.stdin.buffer, out)
    folder = Path(tempfile.gettempdir())
    if folder.name.startswith(FOLDER):  # made for this worker; whoever made it may be gone
        shutil.rmtree(folder, ignore_errors=True)


def answer_lines(server: Server, requests: IO[bytes], answers: IO[bytes]) -> None:
    """A line of ``answers`` for every line of ``requests``, until these end."""
    with contextlib.suppress(BrokenPipeError):
        for line in requests:
            answers.write(server.answer(line) + b"\n")
            answers.flush()
