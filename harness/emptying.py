"""Empties an engine when its program is over: what it still holds then is in no table of a sequence."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from harness.acting import copy_state
from harness.operations import Batch, Operation, Owner, Reset, Snapshot
from harness.target import Session


@dataclass(frozen=True)
class Emptied:
    """Bytes of keys and values in the engine as a whole, ``before`` it was emptied and ``after``; ``owned``: how many
    of them are in the caches of sequences that the model owns, which nobody empties; ``opened``: what it held before
    the first operation. ``error``: which operation raised
    on the way, and what; the numbers say nothing then."""

    before: int = 0
    after: int = 0
    owned: int = 0
    opened: int = 0
    error: str | None = None

    @property
    def allowed(self) -> int:
        """Bytes that may be left."""
        return self.owned + self.opened


def size(session: Session) -> int:
    """What the engine as a whole holds, in bytes. Raises ValueError for an answer that is no size, and whatever the
    engine raises."""
    told = session.footprint()
    if type(told) is not int or told < 0:
        raise ValueError(f"{told!r:.40} is no number of bytes")
    return told


def empty(
    session: Session, owners: tuple[Owner, ...], batch: Collection[int], slots: Iterable[int], opened: int
) -> Emptied:
    """Let everybody leave the ``batch``, reset all sequences, and put an empty one into each of the ``slots`` in which
    there is a snapshot. For a target with the capabilities FOOTPRINT, BYTES and RESET."""
    pooled = [number for number, owner in enumerate(owners) if owner == "pool"]
    operations: list[Operation] = [Batch(())] if batch else []
    operations += [Reset(number) for number in pooled] + [Snapshot(slot, pooled[0]) for slot in slots]
    doing = "telling its size"
    try:
        before = size(session)
        for operation in operations:
            doing = f"{operation.text()} on sequence {operation.index}"
            seen = session.batch(()) if isinstance(operation, Batch) else copy_state(session, operation)
            if seen.error is not None:
                return Emptied(error=f"{doing} raised {seen.error}")
        doing = "telling its size"
        owned = sum(cache.held for each in range(len(owners)) if each not in pooled for cache in session.memory(each))
        after = size(session)
        if (
            after > owned + opened
        ):  # what an exception that was caught refers to may be gone only once cycles are collected
            gc.collect()
            after = size(session)
    except NotImplementedError:  # a misuse, as elsewhere
        raise
    except Exception as failure:  # an engine that cannot tell is an observation, as in ``telling.ask``
        return Emptied(error=f"{doing} raised {type(failure).__name__}: {failure}")
    return Emptied(before, after, owned, opened)
