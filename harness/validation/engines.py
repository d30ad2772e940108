"""What can run a checkpoint in a validation: the reference engine, mlx-lm, or an engine in another process.

An engine opens a checkpoint without loading it, says what it is, and makes targets of it under a mask policy; the plan,
the judges and the verdict are the same for all.
"""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal, cast

from harness import checkpoints
from harness.checkpoints.contents import contents
from harness.checkpoints.locate import locate
from harness.checkpoints.memory import Footprint
from harness.target import Capability, Target
from harness.targets import checkpoint as loaded
from harness.targets import mlx_lm, naming, wire
from harness.targets.checkpoint import device
from harness.targets.mlx_lm_target import LIVE_WINDOW, OWN
from harness.targets.wire import WireTarget
from harness.validation.verdict import LIBRARY

REFERENCE, MLX_LM, WIRE = "reference", "mlx_lm", "wire:"
NAMES = "reference, mlx_lm or wire:COMMAND"


class EngineError(ValueError):
    """An engine that does not exist or cannot do this; one line that names the option."""


class Engine(ABC):
    """``name``: as it was asked for; ``where`` the checkpoint was named; ``title``: its name; ``label``: of the engine
    in file names, "" for the reference engine; ``dtype``: as asked for; ``policies``: of the sides that it can run;
    ``own_word``: which weights it has loaded is only what it says; ``close``: ends what was started for it."""

    name: str
    where: str
    title: str
    family: str
    label: str
    dtype: str | None
    policies: tuple[str, ...] = ("live", "offset")
    replay_options: str = ""
    own_word: bool = False
    close: Callable[[], None] = staticmethod(lambda: None)

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What a report says of the checkpoint: name, family, variant, quantisation, parameters, bytes, notes."""

    @property
    @abstractmethod
    def files(self) -> checkpoints.Files:
        """The files that were checked."""

    @cached_property
    def digests(self) -> checkpoints.Fingerprint:
        """Of those files; streams the weights. CheckpointError."""
        return checkpoints.fingerprint(self.files)

    @property
    @abstractmethod
    def phrase(self) -> str:
        """What it is, for a report."""

    @property
    @abstractmethod
    def needs(self) -> Footprint:
        """Memory that the model takes here."""

    @property
    def vocab_size(self) -> int:
        """How many logits a token has, by the config."""
        config = self.files.config
        return int(config.get("text_config", config).get("vocab_size", 1))

    @property
    def compared(self) -> bool:
        """Are there tolerances for its logits?"""
        return True

    @property
    def computes_in(self) -> str:
        """The type of its numbers."""
        return "float32"

    @property
    def no_images(self) -> str | None:
        """Why no prompt can hold an image; None where one can."""
        return f"{self.name} is asked for text alone"

    @abstractmethod
    def target(self, policy: str, path: Literal["text", "images"] = "text") -> Target:
        """The checkpoint under a mask policy. CheckpointError or TargetError where it cannot be loaded."""

    @abstractmethod
    def limits(self) -> tuple[str, ...]:
        """Sentences on what it cannot show; the first is of the engine. Behind ``target``."""

    @property
    def device(self) -> str:
        """Where it computes."""
        return device()


class ReferenceEngine(Engine):
    """The engine of this repository."""

    name, label = REFERENCE, ""

    def __init__(self, where: str, dtype: str | None) -> None:
        self.where, self.dtype = where, dtype
        self._checkpoint = checkpoints.open_checkpoint(where)
        checkpoints.check(self._checkpoint)
        self.title, self.family = self._checkpoint.name, self._checkpoint.family

    def describe(self) -> dict[str, Any]:
        return checkpoints.as_dict(self._checkpoint, self.digests)

    @property
    def files(self) -> checkpoints.Files:
        return self._checkpoint

    @property
    def phrase(self) -> str:
        return "the reference engine of this harness, with the checkpoint's weights"

    @property
    def needs(self) -> Footprint:
        return checkpoints.footprint(self._checkpoint, self.dtype)

    @property
    def vocab_size(self) -> int:
        return int(self._checkpoint.model_config.vocab_size)

    @property
    def compared(self) -> bool:
        return loaded.compares(self._checkpoint, self.dtype)

    @property
    def computes_in(self) -> str:
        return loaded.computes_in(self._checkpoint, self.dtype)

    @property
    def no_images(self) -> str | None:
        return loaded.why_no_images(self._checkpoint)

    def target(self, policy: str, path: Literal["text", "images"] = "text") -> Target:
        made = loaded.target_of(self._checkpoint, self.where, self.digests.digest, policy, path, self.dtype)
        made.load()
        return made

    def limits(self) -> tuple[str, ...]:
        said = "The engine is the reference engine of this harness: what another makes of the weights is not shown."
        return (said, *(f"Of the family: {limit}." for limit in loaded.limits(self.family)))


class _OfOthers(Engine):
    """An engine that reads the folder itself. What lies there is measured, whatever its model type."""

    def __init__(self, where: str) -> None:
        self.where = where
        found = locate(where)
        self._files = checkpoints.open_files(found.path)
        self.title, self.family = found.name, str(self._files.config["model_type"])
        self._contents = contents(self._files)

    def describe(self) -> dict[str, Any]:
        return {
            "name": self.title,
            "family": self.family,
            "variant": f"model_type {self.family}",
            "quantisation": self._contents.quantisation,
            "parameters": self._contents.parameters,
            "bytes": self._files.weights.bytes,
            "notes": [],
        }

    @property
    def files(self) -> checkpoints.Files:
        return self._files

    @property
    def needs(self) -> Footprint:
        """At most: rows as wide as the model in every layer, or as its heads are together."""
        config = self._files.config.get("text_config", self._files.config)
        sizes = {name: value for name, value in config.items() if type(value) is int}
        heads = sizes.get("num_key_value_heads", 0) * sizes.get("head_dim", 0)
        row = max(sizes.get("hidden_size", 0), heads)
        return Footprint(self._contents.bytes, 2 * 4 * row * sizes.get("num_hidden_layers", 0))


class MlxLmEngine(_OfOthers):
    """mlx-lm: its loader and its model, on caches whose front can be trimmed; its own (LIBRARY) to compare with."""

    name, label = MLX_LM, MLX_LM
    policies = ("live", "offset", LIBRARY)

    def __init__(self, where: str, dtype: str | None) -> None:
        if dtype not in (None, "float32"):
            raise EngineError(f"argument --dtype: mlx_lm is judged in float32 alone, not in {dtype}")
        super().__init__(where)
        self.dtype = None
        self._found = mlx_lm.find(str(self._files.path))
        try:
            self._version = mlx_lm.version()
        except mlx_lm.NotInstalled as error:
            raise EngineError(f"argument --engine: {error}") from error

    @property
    def phrase(self) -> str:
        return f"mlx-lm {self._version}, the model that its own loader makes, on caches whose front can be trimmed"

    def target(self, policy: str, path: Literal["text", "images"] = "text") -> Target:
        if policy == LIBRARY:
            return mlx_lm.of_checkpoint(self._found, OWN)
        made = mlx_lm.of_checkpoint(self._found, LIVE_WINDOW)
        return dataclasses.replace(made, policy=cast(Literal["live", "offset"], policy))

    def limits(self) -> tuple[str, ...]:
        made = mlx_lm.of_checkpoint(self._found, LIVE_WINDOW)
        said = (
            f"The engine is mlx-lm {self._version} on caches of this harness: the library's own have no front trim, "
            "and what its server or its generation loop does beside the model is not run."
        )
        return (said, *(f"Of the engine: {limit}." for limit in mlx_lm.limits_of(made)))


class WireEngine(_OfOthers):
    """An engine in another process that serves the checkpoint."""

    own_word = True

    def __init__(self, where: str, dtype: str | None, command: str, limit: float) -> None:
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
                f"argument --engine: {self.name!r:.200} serves another model: its vocabulary has {target.vocab_size} "
                f"tokens, that of {where:.200} has {told}"
            )
        self.policies = ("live", "offset") if Capability.COUNTERPART in target.capabilities else ("live",)

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

    def target(self, policy: str, path: Literal["text", "images"] = "text") -> Target:
        return dataclasses.replace(self._target, policy=cast(Literal["live", "offset"], policy), text_only=True)

    def limits(self) -> tuple[str, ...]:
        said = (
            "The engine runs in another process: what it tells of its caches and calls is its own word, and so are the "
            "weights that it serves, but for the greedy tokens that were compared."
        )
        return (said, *(f"Of the engine: {limit}." for limit in self._subject.limits))


def reader_of(engine: Engine) -> tuple[Engine, str] | None:
    """Who else can read the weights of the checkpoint, and under which policy; None where nobody can."""
    for make, policy in ((ReferenceEngine, "live"), (MlxLmEngine, LIBRARY)):
        try:
            return make(engine.where, None), policy
        except (checkpoints.CheckpointError, EngineError, naming.TargetError):
            continue
    return None


def open_engine(name: str, where: str, dtype: str | None, limit: float) -> Engine:
    """The engine of this name, with the checkpoint opened and nothing of its weights loaded. EngineError,
    CheckpointError or TargetError, with one line."""
    kind, _, command = name.partition(":")
    if name == REFERENCE:
        return ReferenceEngine(where, dtype)
    if name == MLX_LM:
        return MlxLmEngine(where, dtype)
    if name.startswith(WIRE) and command.strip():
        return WireEngine(where, dtype, command.strip(), limit)
    why = "reads no checkpoint here" if kind == "mlx_vlm" else "is no engine"
    raise EngineError(f"argument --engine: {name!r:.80} {why}; there are {NAMES}")
