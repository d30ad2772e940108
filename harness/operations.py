"""The operation language: what can happen to a KV cache, as values.

A program is a tuple of frozen dataclasses.  It draws nothing, runs nothing and knows no model; it can be compared,
hashed, written as JSON and replayed.  Token ids are not part of an operation: the execution derives them (see
``harness.images.token_ids``), so that ``Prefill(10)`` says everything there is to say.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, get_args

from harness.media import Media, MediaError, check_media, media_from_json

Owner = Literal["pool", "model"]
Generation = Literal["trim", "sinks", "shift"]

#: Upper bounds that a value must respect before anything is allocated for it (a trace file is untrusted input).
MAX_TOKENS = 1 << 11  # of one operation
MAX_TOTAL_TOKENS = 1 << 13  # of a program; scores are [heads, tokens, keys], so this bounds the memory
MAX_COUNT = 1 << 31
MAX_SEQUENCES = 64
MAX_OPERATIONS = 2_000


class OperationError(ValueError):
    """An operation or a program that cannot mean anything; the message is one line and names the value."""


def _check(owner: object, name: str, value: object, low: int, high: int) -> None:
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


@dataclass(frozen=True)
class Prefill(Operation):
    """The first forward of a sequence: ``tokens`` new tokens at once.

    ``media``: the images of the prompt, which is looked at once, here. The prompt reaches to the end of the last one;
    where ``tokens`` is less, the forwards that follow take the rest of it first (a chunked prefill that cuts an
    image). Only the first forward of a sequence can have any.
    """

    code: ClassVar[str] = "prefill"
    tokens: int
    sequence: int = 0
    media: tuple[Media, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        _check(self, "tokens", self.tokens, 1, MAX_TOKENS)
        _check(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)
        try:
            check_media(self.media, MAX_TOKENS)
        except MediaError as error:
            raise OperationError(f"Prefill: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Without the field ``media`` where there is none."""
        data = super().to_json()
        media = [each.to_json() for each in data.pop("media")]
        return data | ({"media": media} if media else {})

    def text(self) -> str:
        """``Prefill(12, image 2x2@3)``."""
        return f"Prefill({', '.join(map(str, (self.tokens, *self.media)))})"


@dataclass(frozen=True)
class Chunk(Operation):
    """A continuation chunk: ``tokens`` new tokens in one forward behind whatever the cache holds."""

    code: ClassVar[str] = "chunk"
    tokens: int
    sequence: int = 0

    def __post_init__(self) -> None:
        _check(self, "tokens", self.tokens, 1, MAX_TOKENS)
        _check(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class Decode(Operation):
    """``times`` forwards of one token each (teacher-forced, so that targets can be compared)."""

    code: ClassVar[str] = "decode"
    times: int = 1
    sequence: int = 0

    def __post_init__(self) -> None:
        _check(self, "times", self.times, 1, MAX_TOKENS)
        _check(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


@dataclass(frozen=True)
class TrimFront(Operation):
    """Drop the oldest ``n`` keys behind the first ``keep`` slots (attention sinks)."""

    code: ClassVar[str] = "trim_front"
    n: int
    keep: int = 0
    sequence: int = 0

    def __post_init__(self) -> None:
        _check(self, "n", self.n, 0, MAX_COUNT)
        _check(self, "keep", self.keep, 0, MAX_COUNT)
        _check(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


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
        _check(self, "limit", self.limit, 1, MAX_COUNT)
        _check(self, "keep", self.keep, 0, MAX_COUNT)
        _check(self, "n_discard", self.n_discard, 0, MAX_COUNT)
        _check(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)
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
        _check(self, "n", self.n, 0, MAX_COUNT)
        _check(self, "sequence", self.sequence, 0, MAX_SEQUENCES - 1)


OPERATIONS: tuple[type[Operation], ...] = (Prefill, Chunk, Decode, TrimFront, EnforceMaxKvSize, Rollback)
FORWARDS = (Prefill, Chunk, Decode)
_BY_CODE = {kind.code: kind for kind in OPERATIONS}


def operation_from_json(data: object) -> Operation:
    """Inverse of ``Operation.to_json``; raises OperationError for anything else."""
    if not isinstance(data, dict):
        raise OperationError(f"an operation must be an object, got {data!r:.60}")
    fields = dict(data)
    code = fields.pop("op", None)
    kind = _BY_CODE.get(code) if isinstance(code, str) else None
    if kind is None:
        raise OperationError(f"unknown operation {code!r:.60}; known are {', '.join(sorted(_BY_CODE))}")
    known = {f.name for f in dataclasses.fields(kind)}
    if unknown := sorted(set(fields) - known):
        raise OperationError(f"operation {code!r} has no field {unknown[0]!r:.60}; it has {', '.join(sorted(known))}")
    try:
        if "media" in fields:
            fields["media"] = media_from_json(fields["media"])
        return kind(**fields)
    except MediaError as error:
        raise OperationError(f"{kind.__name__}: {error}") from error
    except TypeError as error:
        missing = sorted(known - set(fields))
        raise OperationError(f"operation {code!r} lacks a field (one of {', '.join(missing)})") from error


def _processed(operation: Operation) -> int:
    """Tokens that it makes a target process; a prompt with images is looked at to the end of its last one."""
    if isinstance(operation, Decode):
        return operation.times
    media = operation.media if isinstance(operation, Prefill) else ()
    return max(getattr(operation, "tokens", 0), media[-1].end if media else 0)


@dataclass(frozen=True)
class Program:
    """Operations on sequences of one pool; ``owners[i]`` says who owns the caches of sequence i."""

    operations: tuple[Operation, ...]
    owners: tuple[Owner, ...] = ("pool",)

    def __post_init__(self) -> None:
        if not 1 <= len(self.owners) <= MAX_SEQUENCES:
            raise OperationError(f"a program needs 1 to {MAX_SEQUENCES} sequences, got {len(self.owners)}")
        for owner in self.owners:
            if owner not in get_args(Owner):
                raise OperationError(f"a sequence is owned by 'pool' or 'model', got {owner!r:.60}")
        if len(self.operations) > MAX_OPERATIONS:
            raise OperationError(f"a program has at most {MAX_OPERATIONS} operations, got {len(self.operations)}")
        for operation in self.operations:
            if operation.index >= len(self.owners):
                raise OperationError(f"{operation.text()} names sequence {operation.index} of {len(self.owners)}")
        total = sum(_processed(operation) for operation in self.operations)
        if total > MAX_TOTAL_TOKENS:
            raise OperationError(f"a program processes at most {MAX_TOTAL_TOKENS} tokens, this one {total}")
        started: set[int] = set()
        for operation in self.operations:
            if isinstance(operation, Prefill) and operation.media and operation.index in started:
                raise OperationError(f"{operation.text()} has images, but is not the first forward of its sequence")
            if isinstance(operation, FORWARDS):
                started.add(operation.index)

    @property
    def has_media(self) -> bool:
        """Is there an image in it?"""
        return any(isinstance(op, Prefill) and bool(op.media) for op in self.operations)

    def __str__(self) -> str:
        several = len(self.owners) > 1
        parts = [f"s{op.index}:{op.text()}" if several else op.text() for op in self.operations]
        text = " ; ".join(parts) if parts else "(nothing)"
        if self.owners != ("pool",):
            text += "   [" + ", ".join(f"s{i} {owner}-owned" for i, owner in enumerate(self.owners)) + "]"
        return text

    def to_json(self) -> dict[str, Any]:
        return {"owners": list(self.owners), "operations": [op.to_json() for op in self.operations]}

    @classmethod
    def from_json(cls, data: object) -> Program:
        if not isinstance(data, dict) or set(data) != {"owners", "operations"}:
            raise OperationError("a program must be an object with exactly the fields 'owners' and 'operations'")
        owners, operations = data["owners"], data["operations"]
        if not isinstance(owners, list) or not isinstance(operations, list):
            raise OperationError("a program's 'owners' and 'operations' must be lists")
        if len(operations) > MAX_OPERATIONS:
            raise OperationError(f"a program has at most {MAX_OPERATIONS} operations, got {len(operations)}")
        return cls(tuple(operation_from_json(item) for item in operations), tuple(owners))
