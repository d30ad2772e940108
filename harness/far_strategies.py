"""Hypothesis strategies for programs that are far from small. Simplest first: that is where shrinking ends."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from harness.operations import Owner
from harness.strategies import weighted


@dataclass(frozen=True)
class Shape:
    """How a program begins. ``tokens``: of the first sequence, forward by forward. ``crowd``: four sequences and more,
    whose ``lengths`` are few tokens each; otherwise the second has the second of them. ``forks``: some of the others
    are forks of the first."""

    tokens: tuple[int, ...]
    owners: tuple[Owner, ...]
    lengths: tuple[int, ...]
    crowd: bool
    forks: bool


#: A cache grows by 256 slots: right behind the first growth, the second, the third, and behind 1,024 positions, where
#: tables of angles like to end.
_tokens = weighted(
    (2, st.tuples(st.integers(250, 270), st.integers(2, 40))),
    (6, st.tuples(st.integers(250, 258), st.integers(250, 260))),
    (2, st.tuples(st.integers(500, 515), st.integers(255, 260))),
    # In chunks: what a wire tells of a forward grows with its tokens and keys.
    (3, st.tuples(*(st.just(250) for _ in range(4)), st.integers(25, 50))),
    (2, st.tuples(st.integers(254, 256), st.just(1), st.just(1), st.just(1))),  # grows by single tokens
)
_owners: st.SearchStrategy[tuple[Owner, ...]] = weighted(
    (4, st.just(("pool",))), (5, st.just(("pool", "pool"))), (1, st.just(("model",)))
)
_lengths = st.sampled_from((4, 5, 6, 6)).flatmap(lambda rows: st.tuples(*(st.integers(1, 9) for _ in range(rows))))


@st.composite
def _shape(draw: st.DrawFn) -> Shape:
    crowd = draw(st.booleans())
    lengths = draw(_lengths)
    return Shape((lengths[0],) if crowd else draw(_tokens), draw(_owners), lengths, crowd, draw(st.booleans()))


shapes = _shape()
#: More tokens of what is long: a few, or a growth step.
growths = weighted((3, st.integers(2, 24)), (2, st.integers(254, 258)))
#: Keys in front of a gap that a rollback also drops.
over_the_gap = st.integers(0, 2)
#: Any sequence, to be taken modulo their number.
anyone = st.integers(0, 5)
#: All of a crowd in any order, or some of them.
orders = weighted(
    (3, st.permutations(range(6)).map(tuple)),
    (2, st.permutations(range(6)).map(lambda rows: tuple(rows[:4]))),
    (1, st.permutations(range(6)).map(lambda rows: tuple(rows[:2]))),
)
#: New tokens of every row of a crowd.
row_tokens = weighted(
    (1, st.tuples(st.integers(1, 6))),
    (4, st.tuples(*(st.integers(1, 8) for _ in range(6)))),
)
