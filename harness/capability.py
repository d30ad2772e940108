"""What a target can do, and what an operation asks of it."""

from __future__ import annotations

from enum import StrEnum

from harness.operations import (
    Batch,
    BatchDecode,
    BatchForward,
    EnforceMaxKvSize,
    Fork,
    Operation,
    Program,
    QuantizeCache,
    Reset,
    Restore,
    Rollback,
    SaveLoad,
    Snapshot,
    TrimFront,
    Verify,
)


class Capability(StrEnum):
    """What a target can do or show; a property that needs more is NOT APPLICABLE."""

    FRONT_TRIM = "front trim"
    ROLLBACK = "rollback"
    ENFORCE = "enforce max kv size"
    SEQUENCES = "several sequences"
    OWNERSHIP = "model-owned sequences"
    ATTENTION = "attention calls are seen"
    POSITIONS = "position calls are seen"
    LENGTHS = "cache lengths are told"
    ROWS = "cached rows are told"
    COUNTERPART = "the same weights under the other mask policy"
    IMAGES = "prompts with images"
    SNAPSHOT = "snapshots of a sequence"
    FORK = "forks of a sequence"
    SAVE_LOAD = "caches in a file"
    RESET = "a sequence can start again"
    QUANTISE = "caches can be quantised, and what they are given is told"
    INT8 = "caches can be quantised to Int8, too"
    BATCH = "several sequences in one forward"
    UNPADDED = "who goes forward with whom is the target's own affair, and rows are told without padding"
    ATTENTION_VALUES = "what attention is given and gives"
    ARGUMENTS = "arrays that are given and given out are watched"
    BYTES = "bytes that caches hold are told"
    FOOTPRINT = "bytes that the engine as a whole holds are told"
    WITNESS = "an independent witness of its family"
    CACHE_FREE = "one forward without a cache"


#: What a target must be able to do before it is given an operation; of those not named here it can do all.
CAPABILITY_OF: dict[type[Operation], Capability] = {
    TrimFront: Capability.FRONT_TRIM,
    EnforceMaxKvSize: Capability.ENFORCE,
    Rollback: Capability.ROLLBACK,
    Verify: Capability.ROLLBACK,
    Snapshot: Capability.SNAPSHOT,
    Restore: Capability.SNAPSHOT,
    Fork: Capability.FORK,
    SaveLoad: Capability.SAVE_LOAD,
    Reset: Capability.RESET,
    QuantizeCache: Capability.QUANTISE,
    Batch: Capability.BATCH,
    BatchForward: Capability.BATCH,
    BatchDecode: Capability.BATCH,
}


def needed_by(operation: Operation) -> frozenset[Capability]:
    """What a target must be able to do before it is given this operation."""
    needed = {CAPABILITY_OF[type(operation)]} if type(operation) in CAPABILITY_OF else set()
    if isinstance(operation, QuantizeCache) and operation.storage == "int8":  # not every engine has that storage
        needed.add(Capability.INT8)
    return frozenset(needed)


def needs(program: Program) -> frozenset[Capability]:
    """What a target must be able to do to run this program."""
    needed = {capability for operation in program.operations for capability in needed_by(operation)}
    needed |= {Capability.IMAGES} if program.has_media else set()
    needed |= {Capability.SEQUENCES} if len(program.owners) > 1 else set()
    needed |= {Capability.OWNERSHIP} if "model" in program.owners else set()
    return frozenset(needed)
