"""Gives an operation to a session, in the method that is meant for it."""

from __future__ import annotations

from harness.operations import (
    EnforceMaxKvSize,
    Fork,
    Operation,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
)
from harness.target import CopyObservation, RemovalObservation, Session


def remove_keys(session: Session, operation: Operation) -> RemovalObservation:
    """Give an operation that removes keys to a session."""
    if isinstance(operation, TrimFront):
        return session.trim_front(operation.sequence, operation.n, operation.keep)
    if isinstance(operation, Rollback):
        return session.rollback(operation.sequence, operation.n)
    if isinstance(operation, EnforceMaxKvSize):
        return session.enforce(operation)
    raise TypeError(f"unknown operation {operation!r}")


def copy_state(session: Session, operation: Operation) -> CopyObservation:
    """Give an operation on the whole state of a sequence to a session."""
    if isinstance(operation, Snapshot):
        return session.snapshot(operation.sequence, operation.slot)
    if isinstance(operation, Restore):
        return session.restore(operation.sequence, operation.slot)
    if isinstance(operation, Fork):
        return session.fork(operation.sequence, operation.into)
    if isinstance(operation, SaveLoad):
        return session.save_and_load(operation.sequence)
    if isinstance(operation, Reset):
        return session.reset(operation.sequence)
    if isinstance(operation, QuantizeCache):
        return session.quantise(operation.sequence, operation.storage)
    raise TypeError(f"unknown operation {operation!r}")
