"""What a session tells of its caches, beside what the ledger holds."""

from __future__ import annotations

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
    except (EngineGone, NotImplementedError):
        raise
    except Exception as failure:
        raise EngineGone(f"its caches cannot be read: {type(failure).__name__}: {failure}") from failure
    return Told(ledger.state(), tuple(ledger.held), lengths, rows, memory, tuple(ledger.numbers))
