"""Masks in cells: small ones entry by entry, of large ones every wrong entry is seen and the live edge stays sharp."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from harness.cells import BAD, BEYOND, HIDDEN, LACK, MIXED, MOST_COLUMNS, MOST_ROWS, SHOWN, Cells, cells_of


def causal(queries: int, keys: int, wide: int | None = None) -> np.ndarray[Any, Any]:
    """As a model builds it whose mask has ``wide`` keys."""
    wide = keys if wide is None else wide
    return np.tri(queries, wide, wide - queries, dtype=bool)


def test_a_small_mask_is_its_entries() -> None:
    cells = cells_of(causal(2, 4, 6), causal(2, 4), 4)
    assert cells.rows == ("sssbww", "ssssww") and (cells.wrong, cells.beyond, cells.edge) == (1, 4, 4)
    lacks = cells_of(~causal(2, 3), causal(2, 3), 3)
    assert lacks.rows == ("llb", "lll") and lacks.wrong == 6


@pytest.mark.parametrize(
    ("queries", "keys", "wide"),
    [
        (512, 1536, 2048),
        (512, 1536, 1536),
        (97, 193, 194),
        (1, 5000, 7000),
        (2048, 2048, 4096),
        (95, 192, 500),
        (3, 1, 9),
    ],
    ids=str,
)
def test_a_large_mask_fits_and_keeps_its_numbers(queries: int, keys: int, wide: int) -> None:
    shown, visible = causal(queries, keys, wide), causal(queries, keys)
    cells = cells_of(shown, visible, keys)
    assert len(cells.rows) <= MOST_ROWS and len(cells.rows[0]) <= MOST_COLUMNS
    assert cells.wrong == int((shown[:, :keys] != visible).sum()) and cells.beyond == queries * (wide - keys)
    assert all(set(row[cells.edge :]) <= {BEYOND} and BEYOND not in row[: cells.edge] for row in cells.rows)
    while len(cells.rows) > 1:
        coarse = cells.coarser()
        assert (coarse.wrong, coarse.beyond, coarse.keys) == (cells.wrong, cells.beyond, keys)
        assert all(set(row[coarse.edge :]) <= {BEYOND} for row in coarse.rows) and len(coarse.rows) < len(cells.rows)
        cells = coarse


def test_every_cell_is_what_its_block_holds() -> None:
    draw = random.Random(3)
    for _ in range(20):
        queries, keys = draw.randint(97, 400), draw.randint(193, 900)
        visible = causal(queries, keys)
        shown = visible.copy()
        for _ in range(draw.randint(0, 3)):
            at, key = draw.randrange(queries), draw.randrange(keys)
            shown[at, key] ^= True
        cells = cells_of(shown, visible, keys)
        down, across = cells.block
        for row, letters in enumerate(cells.rows):
            for column, letter in enumerate(letters):
                block = slice(row * down, (row + 1) * down), slice(column * across, (column + 1) * across)
                given, must = shown[block], visible[block]
                expected = SHOWN if given.all() else MIXED if given.any() else HIDDEN
                expected = LACK if (must & ~given).any() else expected
                assert letter == (BAD if (given & ~must).any() else expected)


def test_one_wrong_entry_in_a_million_is_seen() -> None:
    visible = causal(1000, 1000)
    for at, letter in (((3, 900), BAD), ((900, 3), LACK)):
        shown = visible.copy()
        shown[at] ^= True
        cells = cells_of(shown, visible, 1000)
        assert cells.wrong == 1 and "".join(cells.rows).count(letter) == 1
        assert "".join(cells.coarser().coarser().rows).count(letter) == 1
    right = cells_of(visible, visible, 1000)
    assert right.wrong == 0 and set("".join(right.rows)) == {SHOWN, HIDDEN, MIXED}


def test_axes_that_broadcast() -> None:
    row = cells_of(np.ones((1, 3), bool), np.ones((2, 3), bool), 3)
    assert row.rows == ("sss", "sss")
    column = cells_of(np.ones((2, 1), bool), np.ones((2, 3), bool), 3)
    assert column.rows == ("sss", "sss") and column.beyond == 0


def test_it_comes_back_from_json() -> None:
    cells = cells_of(causal(512, 1536, 2048), causal(512, 1536), 1536)
    told = json.loads(json.dumps(cells.to_json()))
    assert Cells.from_json(told) == cells and len(json.dumps(told)) < 25_000


@pytest.mark.parametrize(
    "change",
    [
        {"keys": 10**12, "wide": 10**12},
        {"wide": 3},
        {"rows": ["sss"]},
        {"rows": ["sssx", "ssss"]},
        {"rows": ["sss", "ssss"]},
        {"rows": 7},
        {"block": [0, 1]},
        {"block": [1]},
        {"queries": "2"},
        {"wrong": -1},
        {"more": 1},
    ],
    ids=str,
)
def test_what_no_cells_can_be_is_refused(change: dict[str, Any]) -> None:
    right = cells_of(causal(2, 4), causal(2, 4), 4).to_json()
    assert Cells.from_json(right).rows == ("sssh", "ssss")
    with pytest.raises(ValueError, match="cell"):
        Cells.from_json(right | change)
