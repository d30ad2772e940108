"""An engine in another process, which speaks the protocol of ``harness.wire``, and whose word has to be taken."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Literal, cast

from harness.checkpoints.memory import Footprint
from harness.target import Capability, Target
from harness.targets import naming, wire
from harness.targets.wire import WireTarget
from harness.validation.engine import OfOthers, Path
from harness.validation.sides import JUDGED, WIRE, EngineError


class WireEngine(OfOthers):
    """An engine in another process that serves the checkpoint."""

    own_word = True

    def __init__(self, where: str, dtype: str | None, command: str, limit: float, option: str = "--engine") -> None:
        if dtype is not None:
            raise EngineError("argument --dtype: an engine in another process computes in what it was started with")
        super().__init__(where)
        self.dtype, self.name = None, f"{WIRE}{command}"
        self.label = f"wire-{hashlib.sha256(command.encode()).hexdigest()[:8]}"
        self.replay_options = " --run-command" + ("" if limit == naming.LIMIT else f" --limit {limit:g}")
        self._subject = wire.subject(command, naming.Asked(limit=limit))
        self.close = self._subject.close
        target = self._subject.targets[0]
        assert isinstance(target, WireTarget)
        self._target = target
        if (told := super().vocab_size) != target.vocab_size:
            self.close()
            raise EngineError(
                f"argument {option}: {self.name!r:.200} serves another model: its vocabulary has {target.vocab_size} "
                f"tokens, that of {where:.200} has {told}"
            )
        self.policies = JUDGED if Capability.COUNTERPART in target.capabilities else JUDGED[:1]

    @property
    def needs(self) -> Footprint:
        """Of its process, and of whoever reads the weights beside it."""
        return dataclasses.replace(super().needs, weights=2 * super().needs.weights)

    @property
    def phrase(self) -> str:
        said = self._target.identity
        told = str(said.detail["config"]["version"])
        return f"another process, {self.name}, which says that it is {said.family} {said.variant} {told}".strip()

    @property
    def vocab_size(self) -> int:
        return self._target.vocab_size

    @property
    def compared(self) -> bool:
        return Capability.CACHE_FREE in self._target.capabilities

    @property
    def computes_in(self) -> str:
        return "what the engine computes in"

    @property
    def device(self) -> str:
        return self._subject.device

    def _loaded(self, policy: str, path: Path) -> Target:
        return dataclasses.replace(self._target, policy=cast(Literal["live", "offset"], policy), text_only=True)

    def release(self) -> None:
        self.close()  # its process, which has the weights from its start; the next question starts another

    def limits(self) -> tuple[str, ...]:
        said = (
            "The engine runs in another process: what it tells of its caches and calls is its own word, and so are the "
            "weights that it serves, but for the greedy tokens that were compared."
        )
        return (said, *(f"Of the engine: {limit}." for limit in self._subject.limits))
