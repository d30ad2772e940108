"""Operations that remove keys: from the front, from the tail, and as a scheduler's bound."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from harness.operation import MAX_COUNT, MAX_SEQUENCES, Generation, Operation, OperationError, check_number


@dataclass(frozen=True)
class TrimFront(Operation):
    """Drop the oldest ``n`` keys behind the first ``keep`` slots (attention sinks)."""

    code: ClassVar[str] = "trim_front"
    n: int
    keep: int = 0
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "n", self.n, 0, MAX_COUNT)
        check_number(self, "keep", self.keep, 0, MAX_COUNT)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class EnforceMaxKvSize(Operation):
    """The scheduler's bound on the live length, in one of its three generations.

    ``trim``: drop the excess from the front.  ``sinks``: the same, keeping ``min(4, limit - 1)`` slots.  ``shift``:
    context shift with ``keep`` slots and a depth of ``max(excess, n_discard or half of what is not kept)``.
    """

    code: ClassVar[str] = "enforce_max_kv_size"
    limit: int
    generation: Generation = "trim"
    keep: int = 4
    n_discard: int = 0
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "limit", self.limit, 1, MAX_COUNT)
        check_number(self, "keep", self.keep, 0, MAX_COUNT)
        check_number(self, "n_discard", self.n_discard, 0, MAX_COUNT)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)
        if self.generation not in get_args(Generation):
            raise OperationError(
                f"EnforceMaxKvSize: generation must be one of {', '.join(get_args(Generation))}, "
                f"got {self.generation!r:.60}"
            )


@dataclass(frozen=True)
class Rollback(Operation):
    """Drop the newest ``n`` keys (tail trim, as speculative decoding does with rejected drafts)."""

    code: ClassVar[str] = "rollback"
    n: int
    sequence: int = 0

    def __post_init__(self) -> None:
        check_number(self, "n", self.n, 0, MAX_COUNT)
        check_number(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)
