"""The wire target: an engine in another process, which speaks the protocol of ``harness.wire``."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

from harness.operations import Owner
from harness.oracle import Expected, History
from harness.rules import CacheRule, QuantisedStorage
from harness.target import (
    Capability,
    ImageFormat,
    TargetIdentity,
)
from harness.targets.naming import Asked, Subject, TargetError
from harness.targets.wire_session import WireSession
from harness.wire.engine import Engine
from harness.wire.process import WorkerError
from harness.wire.protocol import CAPABILITIES, Description, Policy

KIND = "wire"
LIMITS = (
    "no cache is quantised in mid-program over the wire",
    "the engine tells its own caches and calls: what it tells wrongly is judged as it tells it",
)


class EngineError(Exception):
    """What the engine raised in a forward without a cache."""


@dataclasses.dataclass(frozen=True)
class WireTarget:
    """One engine under one of its mask policies. Targets of one engine share its process. ``text_only``: it is given no
    images, though it may read them."""

    engine: Engine
    policy: Policy = "live"
    text_only: bool = False

    @property
    def _said(self) -> Description:
        return self.engine.description

    @property
    def identity(self) -> TargetIdentity:
        said = self._said
        return TargetIdentity(
            kind=KIND,
            family=said.family,
            variant=said.variant,
            policy=self.policy,
            storage=said.storage,
            weights_seed=0,
            detail={"config": {"command": self.engine.command, "version": said.version}, "options": {}},
            path="text" if self.images is None else "images",
            command=self.engine.command,
        )

    @property
    def capabilities(self) -> frozenset[Capability]:
        told = frozenset(CAPABILITIES[name] for name in self._said.capabilities)
        return told if self.images is not None else told - {Capability.IMAGES}

    @property
    def vocab_size(self) -> int:
        return self._said.vocab_size

    @property
    def images(self) -> ImageFormat | None:
        return None if self.text_only else self._said.images

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return self._said.attention_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        return self._said.windows

    @property
    def rules(self) -> tuple[CacheRule | None, ...]:
        return self._said.rules

    @property
    def row_storage(self) -> str:
        return self._said.storage if self._said.storage in get_args(QuantisedStorage) else "rows"

    @property
    def row_widths(self) -> tuple[tuple[int, int], ...]:  # asked with QUANTISE only, which no worker can say it has
        raise NotImplementedError("no engine is asked over the wire to quantise a cache in mid-program")

    def open(self, owners: tuple[Owner, ...]) -> WireSession:
        return WireSession(self.engine, self.policy, owners, self.capabilities)

    def renew(self) -> None:
        self.engine.stop()

    def counterpart(self) -> WireTarget | None:
        if Capability.COUNTERPART not in self.capabilities:
            return None
        return dataclasses.replace(self, policy="offset" if self.policy == "live" else "live")

    def witness(self, history: History) -> Expected:  # nor WITNESS
        raise NotImplementedError("no witness goes over the wire")

    def cache_free(self, history: History) -> Expected:
        arrays: dict[str, Any] = {"tokens": history.tokens, "positions": history.positions, "visible": history.visible}
        do = "cache_free"
        if self.images is not None:
            do = "cache_free_of_prompts"
            arrays |= {"places": history.places, "prompt_of": history.prompt_of, "prompts": history.prompts}
        said = self.engine.ask(do, **arrays)[0]
        if said.error is not None or said.logits is None:
            raise EngineError(said.error or "no logits and no error")
        wanted = (len(history.tokens), self.vocab_size)
        if said.logits.shape != wanted:
            raise EngineError(f"logits of the shape {list(said.logits.shape)} instead of {list(wanted)}")
        return Expected(said.logits, said.choice_gap, said.rounding_gap, said.dtype)


def subject(rest: str, asked: Asked) -> Subject:
    """The engine that a command starts; it is started, to say what it is."""
    engine = Engine(rest, asked.limit)
    try:
        said = engine.description
        if asked.policy not in said.policies:
            engine.stop()
            raise TargetError(f"wire:{rest!r:.120}: the engine has the mask policy {', '.join(said.policies)} alone")
    except WorkerError as error:
        raise TargetError(f"wire:{rest!r:.120}: {error}") from error
    target = WireTarget(engine, asked.policy)
    limits = LIMITS if said.images else (*LIMITS, "no prompt holds an image: the engine says nothing of images")
    return Subject(KIND, said.family, (target,), said.device, target.identity.path, limits, engine.stop)


def target_from_identity(data: dict[str, Any], asked: Asked) -> WireTarget:
    """Rebuild the target that a trace names. A trace may come from anybody: nothing that it names is run unless the
    person at the keyboard says so. Raises TargetError."""
    fields = {"kind": str, "family": str, "variant": str, "policy": str, "storage": str, "weights_seed": int}
    named = set(data) - {"path"} == {*fields, "command"}
    if not named or any(type(data[name]) is not kind for name, kind in fields.items()):
        raise TargetError(f"a wire target must be an object with the fields {', '.join(fields)}, command")
    command = data["command"]
    if not isinstance(command, str) or not command.strip():
        raise TargetError(f"a wire target's command must be text, got {command!r:.60}")
    if data["policy"] not in ("live", "offset"):
        raise TargetError(f"policy is one of live, offset, got {data['policy']!r:.60}")
    if not asked.run_command:
        raise TargetError(
            f"its target is another process, which the file says is started by {command!r}; nothing was run: add "
            f"--run-command if you trust that command"
        )
    found = subject(command, Asked(data["policy"], limit=asked.limit)).targets[0]
    assert isinstance(found, WireTarget)
    found = dataclasses.replace(found, text_only=data.get("path", "text") == "text")
    for name, was in data.items():
        if name in ("family", "variant", "storage", "path") and (now := getattr(found.identity, name)) != was:
            found.engine.stop()
            raise TargetError(f"the engine is not that of the trace: its {name} is {now!r:.60}, not {was!r:.60}")
    return found
