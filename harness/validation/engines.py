"""Opens the engine that a name stands for: the reference engine, mlx-lm, or an engine in another process."""

from __future__ import annotations

from harness import checkpoints
from harness.targets.naming import TargetError
from harness.validation.engine import Engine
from harness.validation.engine_elsewhere import WireEngine
from harness.validation.engines_here import MlxLmEngine, ReferenceEngine
from harness.validation.sides import LIBRARY, MLX_LM, REFERENCE, WIRE, EngineError, Sides


def reader_of(engine: Engine) -> tuple[Engine, str] | None:
    """Who else can read the weights of the checkpoint, and under which policy; None where nobody can."""
    for make, policy in ((ReferenceEngine, "live"), (MlxLmEngine, LIBRARY)):
        try:
            return make(engine.where, None), policy
        except (checkpoints.CheckpointError, EngineError, TargetError):
            continue
    return None


def open_engine(name: str, where: str, dtype: str | None, limit: float, option: str = "--engine") -> Engine:
    """The engine of this name (as ``sides_of`` gives it), with the checkpoint opened and nothing of its weights loaded
    here. ``option``: which one asked for it. EngineError, CheckpointError or TargetError, with one line."""
    engine: Engine
    if name == REFERENCE:
        engine = ReferenceEngine(where, dtype)
    elif name == MLX_LM:
        engine = MlxLmEngine(where, dtype, option)
    else:
        engine = WireEngine(where, dtype, name.removeprefix(WIRE), limit, option)
    engine.option = option
    return engine


def open_judged(sides: Sides, where: str, dtype: str | None, limit: float) -> Engine:
    """The engine of ``after``. ``dtype`` is what the engines of this process compute in: another process is not told,
    and where there is no engine but such, that it was asked for is an error. Raises as ``open_engine``."""
    told = sides.other is not None and _elsewhere(sides.after.engine) and not _elsewhere(sides.other)
    return open_engine(sides.after.engine, where, None if told else dtype, limit, sides.option)


def open_other(sides: Sides, judged: Engine, dtype: str | None, limit: float) -> Engine | None:
    """The engine of ``before``, on the same checkpoint and without a process that holds its weights; None where it is
    that of ``after``. Whatever is wrong with it names ``--before``: EngineError."""
    name = sides.other
    if name is None:
        return None
    try:
        engine = open_engine(name, judged.where, None if _elsewhere(name) else dtype, limit, "--before")
    except (checkpoints.CheckpointError, TargetError) as error:
        raise EngineError(f"argument --before: {name:.80} cannot be used: {error}") from error
    engine.release()
    known = 1 not in (engine.vocab_size, judged.vocab_size)  # which a config need not say
    if known and engine.vocab_size != judged.vocab_size:
        engine.close()
        raise EngineError(
            f"argument --before: {name:.80} has a vocabulary of {engine.vocab_size} tokens, {judged.name:.80} one of "
            f"{judged.vocab_size}: no token of the one can be compared with the other's"
        )
    return engine


def _elsewhere(name: str) -> bool:
    return name.startswith(WIRE)
