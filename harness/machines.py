"""Which machine a target gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from harness.far_machine import FarImageMachine, FarMachine, FarServingMachine
from harness.image_machine import ImageMachine
from harness.judge import Listener
from harness.judging import Property
from harness.machine import ProgramMachine
from harness.serving_machine import ServingMachine
from harness.target import Capability, Target
from harness.turns import Turns


def make_machine(
    name: str,
    target: Target,
    properties: Sequence[Property],
    listener: Listener | None = None,
    muted: Collection[str] = (),
    turns: Turns | None = None,
    far: bool = False,
) -> type[ProgramMachine]:
    """A machine class with a name of its own.

    Hypothesis derives random choices and database keys from the class: classes made under one name would give every
    family the same programs and one shared database entry.  ``far``: its programs are far from small.
    """
    body: dict[str, Any] = {
        "target": target,
        "properties": tuple(properties),
        "listener": listener,
        "muted": frozenset(muted),
        "turns": turns,
    }
    base: type[ProgramMachine] = FarMachine if far else ProgramMachine
    if Capability.UNPADDED in target.capabilities:
        base = FarServingMachine if far else ServingMachine
    elif target.images is not None:
        base = FarImageMachine if far else ImageMachine
    return type(name, (base,), body)
