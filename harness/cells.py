"""A mask as cells, each of which stands for a block of queries by keys: any mask fits a file and a page.

What is wrong is never averaged away: a cell in which one entry is wrong says so, and no cell lies on both sides of the
live edge, which is where the keys end that attention received.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

SHOWN, HIDDEN, MIXED, BAD, LACK, BEYOND = "shmblw"
"""What a cell holds: entries that are all shown, all hidden, or some of each, as they must be; one that is shown and
must not be; else one that must be shown and is not; entries beyond the keys."""
MOST_ROWS, MOST_COLUMNS = 96, 192
MOST_ENTRIES = 1 << 20
"""Of a mask that a file gives entry by entry."""
_LETTERS = re.compile(f"[{SHOWN}{HIDDEN}{MIXED}{BAD}{LACK}{BEYOND}]*")


@dataclass(frozen=True)
class Cells:
    """``queries`` by ``keys`` (as attention received them) by ``wide`` entries of a row of the mask (no fewer than
    keys). ``block``: how many queries and keys a cell stands for; the last ones of an axis, and those in front of the
    live edge, may stand for fewer. ``rows``: a letter for every cell. ``wrong``: entries over the keys that are not
    what they must be; ``beyond``: entries beyond the keys."""

    queries: int
    keys: int
    wide: int
    block: tuple[int, int]
    rows: tuple[str, ...]
    wrong: int
    beyond: int

    def __post_init__(self) -> None:
        numbers = (self.queries, self.keys, self.wide, *self.block, self.wrong, self.beyond)
        if any(type(number) is not int or number < 0 for number in numbers) or self.wide < self.keys or 0 in self.block:
            raise ValueError(f"no cells of a mask: {numbers!r:.80}")
        columns = len(_starts(self.keys, self.wide, self.block[1], MOST_COLUMNS))
        fit = len(self.rows) == -(-self.queries // self.block[0]) <= MOST_ROWS
        if not fit or any(len(row) != columns or not _LETTERS.fullmatch(row) for row in self.rows):
            raise ValueError("the cells of a mask are not as many as its entries make")

    def to_json(self) -> dict[str, Any]:
        """As in a trace and in a record."""
        return {**vars(self), "block": list(self.block), "rows": list(self.rows)}

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """ValueError for what is none."""
        try:
            rows, block = ((*data[name],) for name in ("rows", "block"))
            if len(block) != 2:
                raise ValueError("a cell of a mask has two sides")
            return cls(**{**data, "rows": rows, "block": block})
        except (TypeError, KeyError) as error:
            raise ValueError(f"no cells of a mask: {error}") from error

    @property
    def edge(self) -> int:
        """The column at which the keys end."""
        return -(-self.keys // self.block[1])

    def coarser(self) -> Cells:
        """The same in a quarter of the cells; itself where it is one row of few."""
        rows = tuple(
            "".join(_joined(part) for part in _parts(group, self.edge))
            for group in (self.rows[at : at + 2] for at in range(0, len(self.rows), 2))
        )
        block = (2 * self.block[0], 2 * self.block[1])
        return Cells(self.queries, self.keys, self.wide, block, rows, self.wrong, self.beyond)


def cells_of(shown: np.ndarray[Any, Any], visible: np.ndarray[Any, Any], keys: int) -> Cells:
    """``shown``: bool [l or 1, key axis of the mask]; ``visible``: bool [l, keys that the ledger expects], what must be
    shown; ``keys``: that attention received. In as many cells as fit."""
    if shown.shape[1] == 1:  # a key axis that broadcasts
        shown = np.broadcast_to(shown, (len(shown), max(1, keys)))
    queries, wide = max(len(shown), len(visible)), max(keys, shown.shape[1])
    given, must = (np.zeros((queries, wide), bool) for _ in range(2))
    given[: queries if len(shown) == 1 else len(shown), : shown.shape[1]] = shown
    must[: len(visible), : visible.shape[1]] = visible[:, :wide]
    wrong = (given != must)[:, :keys]
    down, across = max(1, -(-queries // MOST_ROWS)), max(1, -(-wide // MOST_COLUMNS))
    while len(_starts(keys, wide, across, MOST_COLUMNS + 1)) > MOST_COLUMNS:
        across += 1
    starts = list(range(0, queries, down)), _starts(keys, wide, across, MOST_COLUMNS)

    def blocks(entries: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.add.reduceat(np.add.reduceat(entries.astype(np.int64), starts[0], axis=0), starts[1], axis=1)

    size, inside = blocks(np.ones_like(given)), blocks(given)
    letters = np.select(
        [
            np.broadcast_to(np.asarray(starts[1]) >= keys, size.shape),
            blocks(given & ~must) > 0,
            blocks(must & ~given) > 0,
            inside == size,
            inside == 0,
        ],
        [BEYOND, BAD, LACK, SHOWN, HIDDEN],
        MIXED,
    )
    rows = tuple("".join(row) for row in letters.tolist())
    return Cells(queries, keys, wide, (down, across), rows, int(wrong.sum()), queries * (wide - keys))


def cells_of_rows(shown: Sequence[str], visible: Sequence[str], keys: int) -> Cells:
    """The same of rows of 1 and 0, as traces hold them. ValueError for what is none, or too much."""
    if not 0 <= keys * max(len(shown), len(visible)) <= MOST_ENTRIES:
        raise ValueError(f"{keys} keys are more than a picture shows")
    one, other = (np.array([[entry == "1" for entry in row] for row in rows]) for rows in (shown, visible))
    return cells_of(one, other, keys)


def _starts(keys: int, wide: int, across: int, most: int) -> list[int]:
    """The first key of every column; one more than ``most`` at most: a file may name any numbers."""
    starts: list[int] = []
    for first, last in ((0, keys), (keys, wide)):
        starts += range(first, min(last, first + (most + 1) * across), across)
    return starts


def _parts(rows: Sequence[str], edge: int) -> Iterator[str]:
    """The letters of two columns each, up to the edge and then behind it."""
    for first, last in ((0, edge), (edge, len(rows[0]))):
        for at in range(first, last, 2):
            yield "".join(row[at : min(at + 2, last)] for row in rows)


def _joined(letters: str) -> str:
    """Of several cells as one."""
    for wrong in (BEYOND, BAD, LACK):
        if wrong in letters:
            return wrong
    return letters[0] if len(set(letters)) == 1 else MIXED
