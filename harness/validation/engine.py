"""What runs a checkpoint in a validation: what every engine says of itself and of the checkpoint.

An engine opens a checkpoint without loading it, says what it is, and makes targets of it under a mask policy; the plan,
the judges and the verdict are the same for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import Any, Literal

from harness import checkpoints
from harness.checkpoints.contents import contents
from harness.checkpoints.locate import locate
from harness.checkpoints.memory import Footprint
from harness.target import Target
from harness.targets.checkpoint import device
from harness.targets.device import give_back
from harness.validation.sides import JUDGED

Path = Literal["text", "images"]


class Engine(ABC):
    """``name``: as it was asked for; ``where`` the checkpoint was named; ``title``: its name; ``label``: of the engine
    in file names, "" for the reference engine; ``dtype``: as asked for; ``policies``: of the sides that it can run;
    ``own_word``: which weights it has loaded is only what it says; ``close``: ends what was started for it; ``option``:
    of the command line, which named it."""

    name: str
    where: str
    title: str
    family: str
    label: str
    dtype: str | None
    option: str = "--engine"
    policies: tuple[str, ...] = JUDGED
    replay_options: str = ""
    own_word: bool = False
    _latest: Target | None = None
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

    def phrase_of(self, policy: str) -> str:
        """The same, of a side under this policy."""
        return self.phrase

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

    def target(self, policy: str, path: Path = "text") -> Target:
        """The checkpoint under a mask policy. CheckpointError or TargetError where it cannot be loaded."""
        self._latest = self._loaded(policy, path)
        return self._latest

    @abstractmethod
    def _loaded(self, policy: str, path: Path) -> Target:
        """As ``target``."""

    def release(self) -> None:
        """Let go of the weights, so that another engine can load them; ``target`` loads them again."""
        if self._latest is not None:
            self._latest.renew()
            self._latest = None
        give_back()

    @abstractmethod
    def limits(self) -> tuple[str, ...]:
        """Sentences on what it cannot show; the first is of the engine. Behind ``target``."""

    @property
    def device(self) -> str:
        """Where it computes."""
        return device()


class OfOthers(Engine):
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
