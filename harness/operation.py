"""What every operation has in common: its base, the check of its numbers, and the bounds that they respect."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

Owner = Literal["pool", "model"]
Generation = Literal["trim", "sinks", "shift"]

#: Upper bounds that a value must respect before anything is allocated for it (a trace file is untrusted input).
MAX_TOKENS = 1 << 11  # of one operation
MAX_TOTAL_TOKENS = 1 << 13  # of a program; scores are [heads, tokens, keys], so this bounds the memory
MAX_COUNT = 1 << 31
MAX_SEQUENCES = 64
MAX_SLOTS = 4  # of a pool, for snapshots
MAX_OPERATIONS = 2_000


class OperationError(ValueError):
    """An operation or a program that cannot mean anything; the message is one line and names the value."""


def check_number(owner: object, name: str, value: object, low: int, high: int) -> None:
    kind = type(owner).__name__
    if type(value) is not int:  # bool is an int to isinstance, and never a count
        raise OperationError(f"{kind}: {name} must be a whole number, got {value!r:.60}")
    if not low <= value <= high:
        raise OperationError(f"{kind}: {name} must lie in [{low}, {high}], got {value!r:.60}")


@dataclass(frozen=True)
class Operation:
    """Base of all operations. ``sequence`` is the index of the sequence in the pool that it acts on."""

    code: ClassVar[str] = ""

    @property
    def index(self) -> int:
        """The sequence it acts on (every operation has the field ``sequence``, last, so that it may default)."""
        return int(getattr(self, "sequence"))  # noqa: B009  # the field lives in the subclasses

    def to_json(self) -> dict[str, Any]:
        return {"op": self.code, **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)}}

    def text(self) -> str:
        """The operation without its sequence: ``TrimFront(4)``, with ``name=value`` for what is not the first field
        and not its default."""
        shown = []
        for number, f in enumerate(f for f in dataclasses.fields(self) if f.name != "sequence"):
            value = getattr(self, f.name)
            if number == 0:
                shown.append(str(value))
            elif value != f.default:
                shown.append(f"{f.name}={value}")
        return f"{type(self).__name__}({', '.join(shown)})"
