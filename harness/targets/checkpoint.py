"""A checkpoint as a target: a reference variant whose weights are those of the checkpoint, under either mask policy."""

from __future__ import annotations

import dataclasses
import functools
import re
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from harness import checkpoints
from harness.checkpoints import Checkpoint, CheckpointError
from harness.target import Capability, TargetIdentity
from harness.targets.naming import Asked, Subject, TargetError
from harness.targets.reference import PATHS, POLICIES, ReferenceTarget
from reference_models import registry
from reference_models.registry import Variant

KIND = "checkpoint"
FLOAT32 = "float32"
_OF_FLOAT32 = {Capability.ATTENTION_VALUES, Capability.WITNESS, Capability.CACHE_FREE}
"""What compares numbers: tolerances are known of float32 alone."""
_NAMED = re.compile(r"(?P<where>.+)@(?P<digest>[0-9a-f]{64})(:(?P<dtype>\w+))?", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class LoadedVariant(Variant):
    """The configuration of a checkpoint; ``build`` loads its weights. ``digest``: its fingerprint, by which two are
    told apart; ``dtype``: as ``load_model`` takes it."""

    checkpoint: Checkpoint = field(compare=False, repr=False)
    digest: str
    dtype: str | None = None

    def build(self, seed: int) -> Any:
        """The model with the checkpoint's weights, whatever the seed. CheckpointError names file and key, or says why
        this machine cannot run it: not every kernel has every type, and no program should find that out."""
        model = checkpoints.load_model(self.checkpoint, self.dtype, self.options)
        checkpoints.logits(model, np.array([[0, 1]]))
        return model


@dataclass(frozen=True)
class CheckpointTarget(ReferenceTarget):
    """One checkpoint; nothing but float32 weights that are not packed has its logits compared with others."""

    @property
    def loaded(self) -> LoadedVariant:
        assert isinstance(self.variant, LoadedVariant)
        return self.variant

    @functools.cached_property
    def identity(self) -> TargetIdentity:
        return dataclasses.replace(super().identity, kind=KIND, weights_seed=0)

    @functools.cached_property
    def capabilities(self) -> frozenset[Capability]:
        return super().capabilities - (set() if compares(self.loaded.checkpoint, self.loaded.dtype) else _OF_FLOAT32)

    def load(self) -> None:
        """Now, and not at the first forward. CheckpointError."""
        self.attention_layers  # noqa: B018  # the model tells it


def compares(checkpoint: Checkpoint, dtype: str | None) -> bool:
    """Are there tolerances for its logits, loaded in ``dtype``?"""
    return checkpoint.quantisation is None and computes_in(checkpoint, dtype) == FLOAT32


def computes_in(checkpoint: Checkpoint, dtype: str | None) -> str:
    """The type of its numbers, loaded in ``dtype``: several, where it stores several and none is asked for."""
    names = {"F32": FLOAT32, "F16": "float16", "BF16": "bfloat16"}
    return dtype or ", ".join(sorted(names[stored] for stored in checkpoint.dtypes if stored in names))


def target_of(
    checkpoint: Checkpoint, where: str, digest: str, policy: str = "live", path: str = "text", dtype: str | None = None
) -> CheckpointTarget:
    """The target of an opened checkpoint with this fingerprint. ``where``: what finds it again, for traces."""
    name = f"{where}@{digest}" + (f":{dtype}" if dtype else "")
    variant = LoadedVariant(
        checkpoint.family, name, checkpoint.model_config, checkpoint=checkpoint, digest=digest, dtype=dtype
    )
    return CheckpointTarget(variant, policy, path=path)  # type: ignore[arg-type]


def why_no_images(checkpoint: Checkpoint) -> str | None:
    """Why no prompt of it can hold an image; None where one can."""
    if getattr(checkpoint.model_config, "vision", None) is not None:
        return None
    if checkpoint.vision:
        return "its vision tower is counted, but no model here reads it"
    return "it holds no vision tower"


def limits(family: str) -> tuple[str, ...]:
    """What the reference model of a family leaves out, one phrase each."""
    return registry.LIMITS.get(family, ())


def device() -> str:
    """Where MLX computes, for reports."""
    return str(mx.default_device())


def device_kind() -> str:
    """``cpu`` or ``gpu``."""
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def subject(rest: str, asked: Asked) -> Subject:
    """No campaign runs on a checkpoint. TargetError."""
    raise TargetError(f"a checkpoint is judged by kv-harness validate {rest:.200}")


def target_from_identity(data: object, asked: Asked | None = None) -> CheckpointTarget:
    """Rebuild the target that a trace names, from the place that it names. TargetError, also where another checkpoint
    is there now."""
    fields = {"kind", "family", "variant", "policy", "storage", "weights_seed"}
    if not isinstance(data, dict) or set(data) - {"path"} != fields or not isinstance(data["variant"], str):
        raise TargetError(f"a checkpoint's target must be an object with the fields {', '.join(sorted(fields))}")
    path = data.get("path", "text")
    named = _NAMED.fullmatch(data["variant"])
    if named is None or data["policy"] not in POLICIES or path not in PATHS or data["storage"] != "rows":
        raise TargetError(f"no target of a checkpoint: {data['variant']!r:.100}, {data['policy']!r:.40}, {path!r:.40}")
    try:
        checkpoint = checkpoints.open_checkpoint(named["where"])
        checkpoints.check(checkpoint)
        digest = checkpoints.fingerprint(checkpoint).digest
    except CheckpointError as error:
        raise TargetError(str(error)) from error
    if (checkpoint.family, digest) != (data["family"], named["digest"]):
        raise TargetError(
            f"{named['where']!s:.200}: is another checkpoint now (fingerprint {digest[:16]}, the trace is of "
            f"{named['digest'][:16]})"
        )
    target = target_of(checkpoint, named["where"], digest, data["policy"], path, named["dtype"])
    if path == "images" and (why := why_no_images(checkpoint)) is not None:
        raise TargetError(f"{named['where']!s:.200}: {why}")
    try:
        target.load()
    except CheckpointError as error:
        raise TargetError(str(error)) from error
    return target
