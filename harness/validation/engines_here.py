"""The engines that run a checkpoint in this process: the reference engine, and mlx-lm."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

from harness import checkpoints
from harness.checkpoints.memory import Footprint
from harness.target import Target
from harness.targets import checkpoint as loaded
from harness.targets import mlx_lm
from harness.targets.mlx_lm_target import LIVE_WINDOW, OWN
from harness.targets.naming import TargetError
from harness.validation.engine import Engine, OfOthers, Path
from harness.validation.sides import JUDGED, LIBRARY, MLX_LM, REFERENCE, EngineError


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

    def _loaded(self, policy: str, path: Path) -> Target:
        made = loaded.target_of(self._checkpoint, self.where, self.digests.digest, policy, path, self.dtype)
        made.load()
        return made

    def limits(self) -> tuple[str, ...]:
        said = "The engine is the reference engine of this harness: what another makes of the weights is not judged."
        return (said, *(f"Of the family: {limit}." for limit in loaded.limits(self.family)))


class MlxLmEngine(OfOthers):
    """mlx-lm: its loader and its model, on caches whose front can be trimmed; its own (LIBRARY) to compare with."""

    name, label = MLX_LM, MLX_LM
    policies = (*JUDGED, LIBRARY)

    def __init__(self, where: str, dtype: str | None, option: str = "--engine") -> None:
        if dtype not in (None, "float32"):
            raise EngineError(f"argument --dtype: mlx_lm is judged in float32 alone, not in {dtype}")
        super().__init__(where)
        self.dtype = None
        self._found = mlx_lm.find(str(self._files.path))
        try:
            self._version = mlx_lm.version()
        except mlx_lm.NotInstalled as error:
            raise EngineError(f"argument {option}: {error}") from error

    @property
    def phrase(self) -> str:
        return self.phrase_of(JUDGED[0])

    def phrase_of(self, policy: str) -> str:
        caches = "its own caches" if policy == LIBRARY else "caches whose front can be trimmed"
        return f"mlx-lm {self._version}, the model that its own loader makes, on {caches}"

    def _loaded(self, policy: str, path: Path) -> Target:
        try:
            if policy == LIBRARY:
                return mlx_lm.of_checkpoint(self._found, OWN)
            made = mlx_lm.of_checkpoint(self._found, LIVE_WINDOW)
        except (mlx_lm.UnknownFamily, mlx_lm.NotInstalled) as error:  # which caches it has is seen once it is loaded
            raise TargetError(f"{self.where:.200}: {error}") from error
        return dataclasses.replace(made, policy=cast(Literal["live", "offset"], policy))

    def limits(self) -> tuple[str, ...]:
        made = mlx_lm.of_checkpoint(self._found, LIVE_WINDOW)
        said = (
            f"The engine is mlx-lm {self._version} on caches of this harness: the library's own have no front trim, "
            "and what its server or its generation loop does beside the model is not run."
        )
        return (said, *(f"Of the engine: {limit}." for limit in mlx_lm.limits_of(made)))
