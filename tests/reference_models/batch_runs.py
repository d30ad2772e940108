"""A model over a ragged batch, and the same model over every row alone, through one random schedule.

``Run.step`` draws an operation, applies it to the batch and to the solo caches of each row, and after a forward
compares the logits of every real token. Tokens behind a rollback are new ones, and what stands in padding is anything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from reference_models.engine import BatchCache, CacheSpec, CannotTrim, KVCache, Storage, join_caches
from reference_models.prompt import Images, Prompt

ROUNDING = 1e-5  # relative to the deviation of the logits, in float32
VOCABULARY = 60  # the tokens above are placeholders of features
LARGEST_BATCH = 5
IMAGE = 61
GRIDS = [(1, 2, 4), (1, 4, 4), (1, 6, 2)]  # 2, 4 and 3 tokens

Reader = Callable[[random.Random], tuple[list[int], Any]]
"""Draws the first tokens of a row and what was read of them; None for a row of text."""


@dataclass
class Row:
    """One row alone: its caches, its tokens by absolute position, and the prompt that some of them belong to."""

    caches: list[KVCache]
    tokens: list[int]
    prompt: Any = None

    @property
    def offset(self) -> int:
        return self.caches[0].offset

    def copy(self) -> Row:
        return Row([cache.copy() for cache in self.caches], list(self.tokens), self.prompt)


class Run:
    """``batch`` rows of ``model`` under a schedule of ``seed``."""

    def __init__(
        self,
        model: Any,
        batch: int,
        seed: int,
        storage: Storage | CacheSpec = "rows",
        reader: Reader | None = None,
        rounding: float = ROUNDING,
    ) -> None:
        self.model, self.storage, self.reader, self.rounding = model, storage, reader, rounding
        self.random = random.Random(seed)
        self.worst = 0.0
        self.done: list[str] = []
        self.rows = [self._fresh() for _ in range(batch)]
        self.caches = self._joined(self.rows)

    def _fresh(self) -> Row:
        """A sequence that may have read something, and may have been trimmed."""
        tokens, prompt = self.reader(self.random) if self.reader else ([], None)
        row = Row(self.model.make_caches(self.storage), tokens, prompt)
        if n := self.random.choice((0, 1, 4, 9)):
            self._alone(row, self._next(row, n))
            trim, keep = self.random.choice(((0, 0), (0, 0), (2, 0), (3, 1)))
            self._remove([row], "trim_front", [trim], [keep])
        return row

    def _remove(self, rows: Sequence[Row], name: str, *numbers: Sequence[int]) -> bool:
        """Of every row alone, unless one of its layers refuses; returns whether none did."""
        pairs = [
            (cache, mine) for row, mine in zip(rows, zip(*numbers, strict=True), strict=True) for cache in row.caches
        ]
        try:
            for cache, mine in pairs:
                getattr(cache, f"check_{name}")(*mine)
        except CannotTrim:
            return False
        for cache, mine in pairs:
            getattr(cache, name)(*mine)
        return True

    def _remove_together(self, name: str, *numbers: Sequence[int]) -> bool:
        """Of the batch and of every row alone: some layer refuses here iff one does there, and then no layer acts."""
        refused = 0
        for cache in self.caches:
            try:
                getattr(cache, f"check_{name}")(*numbers)
            except CannotTrim:
                refused += 1
        assert self._remove(self.rows, name, *numbers) == (refused == 0), self.done
        for cache in self.caches if not refused else ():
            getattr(cache, name)(*numbers)
        return not refused

    def _joined(self, rows: Sequence[Row]) -> list[BatchCache]:
        return [join_caches(caches) for caches in zip(*(row.caches for row in rows), strict=True)]

    def _next(self, row: Row, n: int) -> list[int]:
        while len(row.tokens) < row.offset + n:
            row.tokens.append(self.random.randrange(VOCABULARY))
        return row.tokens[row.offset : row.offset + n]

    def _forward(self, tokens: Sequence[Sequence[int]], caches: Sequence[Any], prompt: Any) -> Any:
        prompts = {"prompt": prompt} if self.reader else {}
        return np.array(self.model(mx.array(tokens), caches, **prompts).astype(mx.float32))

    def _alone(self, row: Row, tokens: Sequence[int]) -> Any:
        return self._forward([tokens], row.caches, row.prompt)[0]

    def steps(self, count: int) -> None:
        """Prefill what is empty, then ``count`` operations, and forwards between and behind them."""
        self.padded()
        for _ in range(count):
            self.step()
            self.even(1)
        self.padded()

    def step(self) -> None:
        """One operation, drawn."""
        name = self.random.choice(("even", "padded", "trim_front", "rollback", "filter", "extend", "leave"))
        getattr(self, name)()

    def even(self, n: int = 0) -> None:
        """A forward of as many tokens in every row."""
        self._all([n or self.random.choice((1, 2, 4))] * len(self.rows))

    def padded(self) -> None:
        """A forward that is padded at the right; some rows may have nothing to say."""
        lengths = [self.random.randrange(5) for _ in self.rows]
        lengths[self.random.randrange(len(lengths))] = 3
        for cache in self.caches:
            cache.prepare(lengths)
        self._all(lengths)

    def _all(self, lengths: Sequence[int]) -> None:
        self.done.append(f"forward {list(lengths)} at {[row.offset for row in self.rows]}")
        width = max(lengths)
        given = [self._next(row, n) for row, n in zip(self.rows, lengths, strict=True)]
        padding = [[self.random.randrange(VOCABULARY) for _ in range(width - n)] for n in lengths]
        together = [real + rest for real, rest in zip(given, padding, strict=True)]
        logits = self._forward(together, self.caches, [row.prompt for row in self.rows])
        assert np.isfinite(logits).all(), self.done
        for number, (row, tokens) in enumerate(zip(self.rows, given, strict=True)):
            if tokens:
                expected = self._alone(row, tokens)
                off = float(np.abs(logits[number, : len(tokens)] - expected).max() / expected.std())
                self.worst = max(self.worst, off)
                assert off <= self.rounding, (number, off, self.done)
        self._check()

    def _check(self) -> None:
        for layer, cache in enumerate(self.caches):
            alone = [row.caches[layer] for row in self.rows]
            assert cache.offsets == tuple(one.offset for one in alone), self.done
            assert cache.live_len == tuple(one.live_len for one in alone), self.done
            assert cache.held_len == tuple(one.held_len for one in alone), self.done

    def trim_front(self) -> None:
        counts = [self.random.choice((0, 1, 3, 30)) for _ in self.rows]
        keeps = [self.random.choice((0, 0, 1, 2)) for _ in self.rows]
        self.done.append(f"trim_front {counts} keeping {keeps}")
        self._remove_together("trim_front", counts, keeps)

    def rollback(self) -> None:
        counts = [self.random.choice((0, 1, 2, 5)) for _ in self.rows]
        if self.random.random() < 0.3:
            counts = [1] * len(counts)
        self.done.append(f"rollback {counts}")
        if not self._remove_together("rollback", counts):
            return
        for row, n in zip(self.rows, counts, strict=True):
            if n:
                del row.tokens[row.offset :]
                if row.prompt is not None and row.offset < row.prompt.length:
                    row.prompt = row.prompt.cut(row.offset) if row.offset else None

    def filter(self) -> None:
        rows = [row for row in range(len(self.rows)) if self.random.random() < 0.6] or [0]
        self.random.shuffle(rows)
        self.done.append(f"filter {rows}")
        for cache in self.caches:
            cache.filter(rows)
        self.rows = [self.rows[row] for row in rows]

    def extend(self) -> None:
        new = [self._fresh() for _ in range(self.random.randint(1, max(1, LARGEST_BATCH - len(self.rows))))]
        self.done.append(f"extend by {[row.offset for row in new]}")
        for cache, other in zip(self.caches, self._joined(new), strict=True):
            cache.extend(other)
        self.rows += new

    def leave(self) -> None:
        """A row goes on alone, from what the batch holds of it, and comes back behind the others."""
        number = self.random.randrange(len(self.rows))
        self.done.append(f"row {number} leaves and comes back")
        out = Row([cache.extract(number) for cache in self.caches], *self._words(self.rows[number]))
        for cache in self.caches:
            cache.filter([row for row in range(len(self.rows)) if row != number])
        row = self.rows.pop(number)
        tokens = self._next(row, 2)
        got, expected = self._alone(out, tokens), self._alone(row, tokens)
        assert float(np.abs(got - expected).max() / expected.std()) <= self.rounding, self.done
        for cache, other in zip(self.caches, self._joined([out]), strict=True):
            cache.extend(other)
        self.rows.append(row)

    def _words(self, row: Row) -> tuple[list[int], Any]:
        return list(row.tokens), row.prompt


def prompt_of(model: Any, grid: tuple[int, int, int], before: list[int], behind: list[int], seed: int) -> Prompt:
    pixels = mx.random.normal((math.prod(grid), model.config.vision.patch_pixels), key=mx.random.key(seed))
    tokens = [*before, *[IMAGE] * (math.prod(grid) // 4), *behind]
    read: Prompt = model.read(mx.array([tokens]), Images(pixels, [grid]))
    return read


def reader(model: Any) -> Reader:
    """Two rows in three begin with words, an image, and words."""

    def draw(rng: random.Random) -> tuple[list[int], Any]:
        if rng.random() < 1 / 3:
            return [], None
        before, behind = ([rng.randrange(VOCABULARY) for _ in range(rng.randint(0, 2))] for _ in range(2))
        prompt = prompt_of(model, rng.choice(GRIDS), before, behind, rng.randrange(100))
        return prompt.tokens[0].tolist(), prompt  # type: ignore[return-value]

    return draw
