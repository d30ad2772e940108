"""The harness's side of the wire: a worker that is started when it is needed, and started again when it has died."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, cast

from harness.rules import CacheRule
from harness.wire.axes import MOST, check_answer
from harness.wire.codec import CodecError, decode, encode
from harness.wire.process import BadAnswer, WorkerError, WorkerProcess
from harness.wire.prompts import wrong_format
from harness.wire.protocol import CAPABILITIES, MESSAGES, VERSION, Description, TellingAnswer, line_of, message_of

_SECONDS_TO_LEAVE = 1.0


class Engine:
    """One command, and the worker that it is at the moment. One session is open at a time: opening ends the last."""

    def __init__(self, command: str, limit: float) -> None:
        self.command, self.limit = command, limit
        self._worker: WorkerProcess | None = None
        self.number = 0  # of the last request
        self._description: Description | None = None
        self.session: object | None = None  # whose it is

    @property
    def pid(self) -> int | None:
        """Of its process, where one runs."""
        return None if self._worker is None else self._worker.pid

    @property
    def description(self) -> Description:
        """What the worker said of itself when it was first started. Raises WorkerError."""
        if self._description is None:
            self._start()
        assert self._description is not None
        return self._description

    def stop(self) -> None:
        """End the worker; the next question starts another."""
        self.session = None
        if self._worker is not None:
            self._worker.stop(_SECONDS_TO_LEAVE)
            self._worker = None

    def ask(self, do: str, **fields: Any) -> tuple[Any, tuple[TellingAnswer, ...] | None]:
        """What answers the message, and what caches tell where ``tell`` was among the fields. Raises WorkerError; the
        worker is then ended."""
        if self._worker is None:
            self._start()
        return self._ask(do, **fields)

    def _ask(self, do: str, **fields: Any) -> tuple[Any, tuple[TellingAnswer, ...] | None]:
        assert self._worker is not None
        self.number += 1
        request = {"id": self.number, "do": do, **{name: encode(value) for name, value in fields.items()}}
        try:
            line = self._worker.exchange(line_of(request))
            try:
                return self._read(do, line, fields)
            except CodecError as error:
                raise BadAnswer(f"the engine's answer to {do!r}: {error}") from error
        except BaseException:
            self._worker.stop()
            self._worker = self.session = None
            raise

    def _read(self, do: str, line: bytes, fields: Mapping[str, Any]) -> tuple[Any, tuple[TellingAnswer, ...] | None]:
        answer = message_of(line)
        if (number := answer.pop("id")) != self.number:
            raise CodecError(f"it answers the request {number!r:.40}, asked was {self.number}")
        if "bad_request" in answer:
            raise BadAnswer(f"the engine refused {do!r}: {' '.join(str(answer['bad_request']).split())[:300]}")
        told = None
        if "tell" in fields:
            told = decode(cast(Any, tuple[TellingAnswer, ...]), answer.pop("told", None), "told")
        said = decode(MESSAGES[do][1], answer, "answer")
        check_answer(fields, said, told, self._description)
        return said, told

    def _start(self) -> None:
        self._worker = WorkerProcess(self.command, self.limit)
        said = self._ask("hello", protocol=VERSION)[0]
        try:
            said = _checked(said)
            if self._description is not None and said != self._description:
                raise BadAnswer(f"the engine, started again, is another: {_difference(self._description, said)}")
        except WorkerError:
            self.stop()
            raise
        self._description = said


def _checked(said: Description) -> Description:
    """With windows and rules for every layer. Raises BadAnswer."""
    if said.protocol != VERSION:
        raise BadAnswer(f"the engine speaks version {said.protocol} of the protocol, this harness {VERSION}")
    if unknown := [name for name in said.capabilities if name not in CAPABILITIES]:
        raise BadAnswer(f"the engine has the capability {unknown[0]!r:.60}, there are {', '.join(CAPABILITIES)}")
    layers = len(said.attention_layers)
    for name, count in (("windows", len(said.windows)), ("rules", len(said.rules))):
        if count not in (0, layers):
            raise BadAnswer(f"the engine has {count} {name} for {layers} attention layers")
    if odd := [w for w in said.windows if w is not None and not 1 <= w <= MOST]:
        raise BadAnswer(f"the engine has a window of {odd[0]} keys")
    if odd_rules := [rule for rule in said.rules if rule is not None and not _sensible(rule)]:
        raise BadAnswer(f"the engine has a rule that no cache can have: {odd_rules[0]!s:.200}")
    if not layers or said.vocab_size < 2 or not said.policies or not said.family.strip():
        raise BadAnswer("the engine has no attention layer, no family, no policy or fewer than two tokens")
    if ("counterpart" in said.capabilities) != (set(said.policies) == {"live", "offset"}):
        raise BadAnswer("the engine has the capability 'counterpart' without both policies, or both without it")
    if ("images" in said.capabilities) != (said.images is not None):
        raise BadAnswer("the engine has the capability 'images' without that field, or the field without it")
    if said.images is not None and (wrong := wrong_format(said.images, said.vocab_size)):
        raise BadAnswer(f"the engine's images: {wrong}")
    windows, rules = said.windows or (None,) * layers, said.rules or (None,) * layers
    return dataclasses.replace(said, windows=windows, rules=rules)


def _sensible(rule: CacheRule) -> bool:
    """Can there be such a cache? Who counts chunks divides by their length."""
    lengths = [length for length in (rule.window, rule.chunk, rule.keeps) if length is not None]
    sinks = rule.sinks == 0 if rule.window is None else 0 <= rule.sinks < rule.window
    return sinks and all(1 <= length <= MOST for length in lengths)


def _difference(was: Description, now: Description) -> str:
    for field in dataclasses.fields(was):
        before, after = getattr(was, field.name), getattr(now, field.name)
        if before != after:
            return f"{field.name} was {before!r:.60} and is {after!r:.60}"
    return "nothing"
