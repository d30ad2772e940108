"""What the rows of a batch hold, in numbers alone: no buffers, and all that masks and rotations need to know."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .runs import in_slots


@dataclass(frozen=True)
class Row:
    """Lengths and positions of one sequence, with the meaning they have in ``KVCache``. Every change makes a new row.

    Attributes:
        offset: absolute position of its next token, in tokens.
        live_start: tokens that front trims removed.
        held: runs of the absolute positions held, ascending, in slot order.
    """

    offset: int = 0
    live_start: int = 0
    held: tuple[range, ...] = ()

    @property
    def live_len(self) -> int:
        """Keys held, in tokens."""
        return self.offset - self.live_start

    def appended(self, n: int) -> "Row":
        """The row behind n >= 0 more tokens."""
        if n == 0:
            return self
        held, first = self.held, self.offset
        if held and held[-1].stop == first:
            held, first = held[:-1], held[-1].start
        return Row(self.offset + n, self.live_start, (*held, range(first, self.offset + n)))

    def trimmed(self, n: int, keep: int) -> tuple["Row", list[range]]:
        """The row without the n tokens behind its first ``keep``, both in range, and the live slots that it kept."""
        slots = [range(keep), range(keep + n, self.live_len)]
        held = tuple(run for part in slots for run in in_slots(self.held, part.start, part.stop))
        return Row(self.offset, self.live_start + n, held), slots

    def rolled_back(self, n: int) -> "Row":
        """The row without its n newest tokens, n in range."""
        return Row(self.offset - n, self.live_start, tuple(in_slots(self.held, 0, self.live_len - n)))

    def told(self) -> dict[str, Any]:
        """As JSON: ``offset``, ``live_start``, ``held`` (``[start, stop]`` of every run)."""
        held = [[run.start, run.stop] for run in self.held]
        return {"offset": self.offset, "live_start": self.live_start, "held": held}

    @classmethod
    def of(cls, told: dict[str, Any]) -> "Row":
        """Inverse of ``told``. Raises ValueError where the runs are not as long as the lengths say."""
        row = cls(told["offset"], told["live_start"], tuple(range(start, stop) for start, stop in told["held"]))
        if sum(map(len, row.held)) != row.live_len:
            raise ValueError(f"positions {told['held']} for a live length of {row.live_len}")
        return row


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


class BatchLengths:
    """Lengths and positions of the rows of a batch, aligned at the right.

    Attributes:
        prepared: tokens of each row in the next append, None when that will be all of them; see ``prepare``.
    """

    def __init__(self, batch: int) -> None:
        """``batch`` rows without tokens. Raises ValueError for a negative number."""
        if batch < 0:
            raise ValueError(f"a batch cannot have {batch} rows")
        self.prepared: tuple[int, ...] | None = None
        self._rows: tuple[Row, ...] = (Row(),) * batch

    @property
    def batch(self) -> int:
        """Number of rows, B."""
        return len(self._rows)

    @property
    def slots(self) -> int:
        """Slots that all rows share: the largest live length, in tokens."""
        return max((row.live_len for row in self._rows), default=0)

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
        """Keys held by each row, in tokens."""
        return tuple(row.live_len for row in self._rows)

    @property
    def padding(self) -> tuple[int, ...]:
        """Dead slots at the left of each row."""
        return tuple(self.slots - row.live_len for row in self._rows)

    def positions(self, row: int) -> mx.array:
        """Absolute positions of the keys that ``row`` holds, in slot order: int32 ``[live_len]``. ValueError for a row
        that is not there."""
        return self.slot_positions[self._index(row), self.padding[row] :]

    @property
    def slot_positions(self) -> mx.array:
        """Absolute position in every slot: int32 ``[B, slots]``, -1 where there is padding."""
        return right_aligned([row.held for row in self._rows], self.slots, -1)

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

    def _index(self, row: int) -> int:
        if not 0 <= row < self.batch:
            raise ValueError(f"row {row} of a batch of {self.batch} rows")
        return row

    def _settled(self, action: str) -> None:
        if self.prepared is not None:
            raise ValueError(
                f"cannot {action} a cache that is prepared for lengths {list(self.prepared)}: append first"
            )
