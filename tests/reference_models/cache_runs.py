"""A model on caches of some kind, beside what one forward without a cache needs to say the same."""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from reference_models import registry
from reference_models.engine import CacheSpec, CannotTrim, NoCache, Storage, VisibilityRule
from reference_models.registry import Variant

VARIANTS = [variant for family in registry.FAMILIES for variant in registry.variants(family)]
SPECS = (
    CacheSpec("rotating", window=5),
    CacheSpec("rotating", window=1),
    CacheSpec("rotating", window=6, sinks=2),
    CacheSpec("chunked", chunk=4),
    CacheSpec("paged", block=4),
    CacheSpec("rotating", window=5, storage="int8"),
)
#: Int8 steps that two ways of summing in float32 may round apart; see test_storage for the rows themselves.
TOLERANCE: dict[Storage, float] = {"rows": 1e-5, "int8": 0.05, "affine8": 0.01}

name_of = functools.partial("{0.family}-{0.name}".format)


@functools.cache
def built(variant: Variant) -> Any:
    return variant.build(7)


def rule_of(spec: CacheSpec, window: int | None) -> VisibilityRule:
    """What a layer with this window shows, said once more."""
    if spec.kind == "chunked":
        return VisibilityRule(chunk=spec.chunk)
    if spec.kind == "rotating" and (spec.window or window):
        return VisibilityRule(spec.window or window, spec.sinks)
    return VisibilityRule()


def token(position: int, turn: int) -> int:
    return (7 * position + 13 * turn + 3) % 60  # below the ids of images


class Run:
    """A model on caches, and all that one forward without a cache needs to say the same."""

    def __init__(self, variant: Variant, spec: CacheSpec) -> None:
        self.model, self.spec = built(variant), spec
        self.windows = getattr(self.model, "windows", (None,) * len(self.model.attention_layers))
        self.caches = self.model.make_caches(spec)
        self.left: list[Any] = []  # what copies were made of
        self.tokens: list[int] = []
        self.starts: list[int] = []  # of every token: live_start when it was processed
        self.logits: list[Any] = []
        self.start = self.turn = 0

    def forward(self, l: int) -> None:
        self.turn += 1
        new = [token(len(self.tokens) + i, self.turn) for i in range(l)]
        self.logits += list(np.array(self.model(mx.array([new]), self.caches)[0]))
        self.tokens += new
        self.starts += [self.start] * l
        if self.left:  # they go on as well, when the copies have written already
            self.model(mx.array([[1, 2, 3]]), self.left)
            self.left = []

    def decode(self, n: int) -> None:
        for _ in range(n):
            self.forward(1)

    def trim(self, n: int) -> None:
        try:
            for cache in self.caches:
                cache.check_trim_front(n)
        except CannotTrim:
            return
        (removed,) = {cache.trim_front(n) for cache in self.caches}
        self.start += removed

    def rollback(self, n: int) -> None:
        try:
            for cache in self.caches:
                cache.check_rollback(n)
        except CannotTrim:
            return
        (removed,) = {cache.rollback(n) for cache in self.caches}
        for kept in (self.tokens, self.starts, self.logits):
            del kept[len(kept) - removed :]

    def go_on_with_copies(self) -> None:
        self.left, self.caches = self.caches, [cache.copy() for cache in self.caches]

    def expected(self) -> Any:
        n = len(self.tokens)
        q, p, start = np.arange(n)[:, None], np.arange(n), np.array(self.starts)[:, None]
        masks = {}
        for window in dict.fromkeys(self.windows):
            shown = np.array(rule_of(self.spec, window).mask(mx.arange(n), mx.arange(n)))
            masks[window] = mx.array(shown & (p >= start) & (p > q - (window or n)))
        offset = 0 if hasattr(self.model, "read") else mx.arange(n)
        caches = [NoCache(offset, self.spec.storage) for _ in self.windows]
        return np.array(self.model(mx.array([self.tokens]), caches, masks)[0])

    def error(self) -> float:
        """Largest difference of a logit, in standard deviations of the right ones."""
        if not self.tokens:
            return 0.0
        expected = self.expected()
        return float(np.abs(np.array(self.logits) - expected).max() / expected.std())


CUTS: list[list[tuple[Any, ...]]] = [
    [("forward", 20)],
    [("decode", 20)],
    [("forward", 9), ("decode", 6), ("forward", 4), ("decode", 2)],
    [("decode", 7), ("forward", 8), ("forward", 3), ("decode", 4)],
]


def run(variant: Variant, spec: CacheSpec, program: list[tuple[Any, ...]]) -> Run:
    one = Run(variant, spec)
    for name, *arguments in program:
        getattr(one, name)(*arguments)
    return one
