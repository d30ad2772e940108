"""Where MLX computes."""

from __future__ import annotations

import gc

import mlx.core as mx

from harness.targets.naming import TargetError


def use_device(name: str) -> None:
    """Make ``cpu`` or ``gpu`` the device of everything that follows. TargetError when MLX has no such device here."""
    chosen = {"cpu": mx.cpu, "gpu": mx.gpu}.get(name)
    if chosen is None:
        raise TargetError(f"the device is cpu or gpu, not {name!r:.40}")
    if not mx.is_available(chosen):
        raise TargetError(f"MLX has no {name} here; leave the device out, or install another build of MLX")
    mx.set_default_device(chosen)


def device() -> str:
    """Where the reference models run and in which precision, for reports."""
    return f"{mx.default_device()}, float32 weights"


def give_back() -> None:
    """Give the memory of arrays that nothing refers to any more back to the machine, where MLX keeps it."""
    gc.collect()  # a model and its layers refer to one another
    mx.clear_cache()


def compiles() -> bool:
    """Does MLX keep what it compiled? The Python of a compiled function then runs once for arrays of one shape."""
    ran: list[None] = []

    def counted(array: mx.array) -> mx.array:
        ran.append(None)
        return array + 1

    compiled = mx.compile(counted)
    for number in (1.0, 2.0):
        mx.eval(compiled(mx.array([number])))
    return len(ran) < 2
