"""What the rows of a batch hold, in numbers alone: no buffers, and all that masks and rotations need to know."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from .errors import CannotTrim
from .ruled import check_front, check_rollback
from .runs import found, in_slots, joined
from .visibility import EVERYTHING, VisibilityRule


@dataclass(frozen=True)
class Row:
    """Lengths and positions of one sequence, with the meaning they have in its own cache. Every change makes a new row.

    Attributes:
        offset: absolute position of its next token, in tokens.
        live_start: tokens that front trims removed.
        held: runs of the absolute positions held, ascending, in slot order.
        rule: what a query sees of what is held, as in ``RuledKVCache``.
    """

    offset: int = 0
    live_start: int = 0
    held: tuple[range, ...] = ()
    rule: VisibilityRule = EVERYTHING

    @property
    def tokens(self) -> int:
        """As many as a trim or a rollback can remove: without a rule they are all held."""
        return self.offset - self.live_start

    @property
    def held_len(self) -> int:
        """Slots in use."""
        return sum(map(len, self.held))

    @property
    def live_len(self) -> int:
        """Keys held that the next token sees, without its own."""
        return sum(map(len, self.seen))

    @property
    def seen(self) -> list[range]:
        """The live slots of those keys, ascending."""
        if self.rule == EVERYTHING:
            return [range(self.held_len)]
        return [range(slot, slot + len(run)) for slot, run in found(self.held, self.rule.before(self.offset))]

    def cut(self) -> "Row":
        """The row with what its next token sees, alone."""
        if self.rule == EVERYTHING:
            return self
        return replace(self, held=tuple(joined(run for _, run in found(self.held, self.rule.before(self.offset)))))

    def appended(self, n: int) -> "Row":
        """The row behind n >= 0 more tokens, the first of which made it forget."""
        if n == 0:
            return self
        held = joined([*self.cut().held, range(self.offset, self.offset + n)])
        return replace(self, offset=self.offset + n, held=tuple(held))

    def trimmed(self, n: int, keep: int) -> tuple["Row", list[range]]:
        """The row without the n tokens behind its first ``keep``, both in range, and the live slots that it kept; with
        a rule without the n oldest, by position."""
        start = self.live_start + n
        if self.rule == EVERYTHING:
            slots = [range(keep), range(keep + n, self.held_len)]
            held = tuple(run for part in slots for run in in_slots(self.held, part.start, part.stop))
        else:
            parts = found(self.held, [range(start, self.offset)])
            slots = [range(slot, slot + len(run)) for slot, run in parts]
            held = tuple(run for _, run in parts)
        return replace(self, live_start=start, held=held), slots

    def rolled_back(self, n: int) -> "Row":
        """The row without its n newest tokens, n in range; of the live slots it keeps the first."""
        if self.rule == EVERYTHING:
            held = in_slots(self.held, 0, self.held_len - n)
        else:
            held = [run for _, run in found(self.held, [range(self.offset - n)])]
        return replace(self, offset=self.offset - n, held=tuple(held))

    def told(self) -> dict[str, Any]:
        """As JSON: ``offset``, ``live_start``, ``held`` (``[start, stop]`` of every run)."""
        held = [[run.start, run.stop] for run in self.held]
        return {"offset": self.offset, "live_start": self.live_start, "held": held}

    @classmethod
    def of(cls, told: dict[str, Any], rule: VisibilityRule = EVERYTHING) -> "Row":
        """Inverse of ``told``. Raises ValueError where the runs are not those that the lengths and the rule ask for."""
        row = cls(told["offset"], told["live_start"], tuple(range(start, stop) for start, stop in told["held"]), rule)
        if rule == EVERYTHING and row.held_len != row.tokens:
            raise ValueError(f"positions {told['held']} for a live length of {row.tokens}")
        try:
            row.check_rollback(0)
        except CannotTrim as error:
            raise ValueError(f"keys are missing: {error}") from error
        return row

    def check_front(self, n: int, keep: int) -> None:
        """Raise CannotTrim where a cache of this row alone would refuse such a trim."""
        if self.rule != EVERYTHING:
            check_front(self.rule, self.tokens, n, keep)

    def check_rollback(self, n: int) -> None:
        """Raise CannotTrim where a cache of this row alone would refuse such a rollback."""
        if self.rule != EVERYTHING:
            check_rollback(self.rule, self.offset, self.live_start, self.held, n)


def right_aligned(runs: Sequence[Sequence[range]], slots: int, filler: int) -> mx.array:
    """Numbers of the runs of each row behind as many fillers as it needs: int32 ``[len(runs), slots]``."""
    if not runs:
        return mx.zeros((0, slots), mx.int32)
    rows = []
    for row in runs:
        counted = [mx.arange(run.start, run.stop, dtype=mx.int32) for run in row]
        rows.append(mx.concatenate([mx.full((slots - sum(map(len, row)),), filler, mx.int32), *counted]))
    return mx.stack(rows)


def one_each(name: str, numbers: Sequence[int], batch: int) -> tuple[int, ...]:
    """``numbers``, one for each of ``batch`` rows. Raises ValueError for another count, and for a negative one."""
    if len(numbers) != batch:
        raise ValueError(f"{len(numbers)} {name} for a batch of {batch} rows")
    if any(number < 0 for number in numbers):
        raise ValueError(f"{name} {list(numbers)}: none may be negative")
    return tuple(numbers)


@contextmanager
def _named(row: int) -> Iterator[None]:
    """Says whose refusal it is."""
    try:
        yield
    except CannotTrim as error:
        raise CannotTrim(f"row {row}: {error}") from None


class BatchLengths:
    """Lengths and positions of the rows of a batch, aligned at the right.

    Attributes:
        rule: of the caches that the rows had, each by itself, and have again when they leave.
        prepared: tokens of each row in the next append, None when that will be all of them; see ``prepare``.
    """

    def __init__(self, batch: int, rule: VisibilityRule = EVERYTHING) -> None:
        """``batch`` rows without tokens. Raises ValueError for a negative number."""
        if batch < 0:
            raise ValueError(f"a batch cannot have {batch} rows")
        self.rule = rule
        self.prepared: tuple[int, ...] | None = None
        self._rows: tuple[Row, ...] = (Row(rule=rule),) * batch

    @property
    def batch(self) -> int:
        """Number of rows, B."""
        return len(self._rows)

    @property
    def slots(self) -> int:
        """Slots that all rows share: as many as the row with the most holds."""
        return max((row.held_len for row in self._rows), default=0)

    @property
    def offset(self) -> mx.array:
        """Absolute position of the next token of every row: int32 ``[B, 1]``, which broadcasts over the tokens of a
        chunk. A new array each time, so that one that was read before an append still says what it said."""
        return mx.array([[row.offset] for row in self._rows], dtype=mx.int32).reshape(self.batch, 1)

    @property
    def offsets(self) -> tuple[int, ...]:
        """``offset`` of each row as a number, in tokens."""
        return tuple(row.offset for row in self._rows)

    @property
    def live_start(self) -> tuple[int, ...]:
        """``KVCache.live_start`` of each row, in tokens."""
        return tuple(row.live_start for row in self._rows)

    @property
    def live_len(self) -> tuple[int, ...]:
        """``KVCache.live_len`` of each row: keys held that its next token sees."""
        return tuple(row.live_len for row in self._rows)

    @property
    def held_len(self) -> tuple[int, ...]:
        """Slots that each row uses; with a rule there may be more than are seen."""
        return tuple(row.held_len for row in self._rows)

    @property
    def padding(self) -> tuple[int, ...]:
        """Dead slots at the left of each row."""
        slots = self.slots
        return tuple(slots - row.held_len for row in self._rows)

    def positions(self, row: int) -> mx.array:
        """Absolute positions of the keys that ``row`` holds, in slot order: int32 ``[held_len]``. ValueError for a row
        that is not there."""
        return self.slot_positions[self._index(row), self.padding[row] :]

    @property
    def slot_positions(self) -> mx.array:
        """Absolute position in every slot: int32 ``[B, slots]``, -1 where there is padding."""
        return right_aligned([row.held for row in self._rows], self.slots, -1)

    def key_positions(self, l: int) -> mx.array:
        """Absolute positions of all keys that an append of l tokens a row would return now, int32 ``[B, K + l]``: K is
        the most that any row brings along, -1 stands where another has padding. Nothing changes."""
        held = [row.held for row in self._ready()]
        slots = max((sum(map(len, runs)) for runs in held), default=0)
        new = self.offset + mx.arange(l, dtype=mx.int32)
        return mx.concatenate([right_aligned(held, slots, -1), new], axis=1)

    def check_trim_front(self, counts: Sequence[int], keep: int | Sequence[int] = 0) -> None:
        """Raise what ``trim_front`` would raise, and change nothing."""
        self._settled("trim")
        counts, keeps = one_each("counts", counts, self.batch), self._keeps(keep)
        for number, (row, n, sinks) in enumerate(zip(self._rows, counts, keeps, strict=True)):
            with _named(number):
                row.check_front(n, sinks)

    def check_rollback(self, counts: Sequence[int]) -> None:
        """Raise what ``rollback`` would raise, and change nothing."""
        self._settled("roll back")
        for number, (row, n) in enumerate(zip(self._rows, one_each("counts", counts, self.batch), strict=True)):
            with _named(number):
                row.check_rollback(n)

    def prepare(self, lengths: Sequence[int] | None) -> None:
        """Say that the next append is padded at the right: of row r only the first ``lengths[r]`` tokens are real.

        Call it on the caches of all layers before the forward: models then take the mask and the rotations from it.
        None takes it back; the append does so too.

        Raises:
            ValueError: not one length for each row, a negative one, or none above 0.
        """
        if lengths is not None and not any(one_each("lengths", lengths, self.batch)):
            raise ValueError(f"lengths {list(lengths)}: no row would have a token")
        self.prepared = None if lengths is None else tuple(lengths)

    def _ready(self) -> tuple[Row, ...]:
        """The rows as the next append finds them: each that gets a token has forgotten what that does not see."""
        lengths = (1,) * self.batch if self.prepared is None else self.prepared
        return tuple(row.cut() if n else row for row, n in zip(self._rows, lengths, strict=True))

    def _keeps(self, keep: int | Sequence[int]) -> tuple[int, ...]:
        return one_each("sinks", (keep,) * self.batch if isinstance(keep, int) else keep, self.batch)

    def _index(self, row: int) -> int:
        if not 0 <= row < self.batch:
            raise ValueError(f"row {row} of a batch of {self.batch} rows")
        return row

    def _settled(self, action: str) -> None:
        if self.prepared is not None:
            raise ValueError(
                f"cannot {action} a cache that is prepared for lengths {list(self.prepared)}: append first"
            )
