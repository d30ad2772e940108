"""What a session tells of its caches, beside what the ledger holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.capability import Capability
from harness.ledger import SequenceLedger, SequenceState
from harness.target import CacheLengths, CacheMemory, CacheRows, EngineGone, Session, Target


@dataclass(frozen=True)
class Told:
    """One sequence after an operation: the ledger's side (state, absolute positions held, the numbers of their tokens)
    and what its caches say."""

    state: SequenceState
    held: tuple[int, ...]
    lengths: tuple[CacheLengths, ...]
    rows: tuple[CacheRows, ...]
    memory: tuple[CacheMemory, ...] = ()
    numbers: tuple[int, ...] = ()


def ask(target: Target, session: Session, ledger: SequenceLedger, sequence: int) -> Told:
    """Of one sequence, now. Raises EngineGone, also for whatever is raised by caches that cannot be read any more: that
    is an observation, as an error of a forward is, and NotImplementedError alone is a misuse."""
    try:
        lengths, rows = session.lengths(sequence), session.rows(sequence)
        memory = session.memory(sequence) if Capability.BYTES in target.capabilities else ()
        _check(len(target.attention_layers), {"lengths": lengths, "rows": rows, "memory": memory})
    except (EngineGone, NotImplementedError):
        raise
    except Exception as failure:
        raise EngineGone(f"its caches cannot be read: {type(failure).__name__}: {failure}") from failure
    return Told(ledger.state(), tuple(ledger.held), lengths, rows, memory, tuple(ledger.numbers))


def _check(layers: int, told: dict[str, Sequence[object]]) -> None:
    """What is said of some caches only, or of bytes that are no number, would be compared as far as it goes. The same
    holds for what comes over the wire (``wire.axes``)."""
    for name, each in told.items():
        if len(each) not in (0, layers):
            raise EngineGone(f"its caches cannot be read: {name} of {len(each)} caches, attention has {layers} layers")
    for number, cache in enumerate(told["memory"]):
        for size in (cache.held, cache.per_slot) if isinstance(cache, CacheMemory) else ():
            if type(size) is not int or size < 0:
                raise EngineGone(f"its caches cannot be read: {size!r:.40} bytes of cache {number}")
