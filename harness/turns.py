"""Whose turn it is: a property that runs a program a second time judges some of the programs of a campaign only.

Every comparison costs as many forwards as the program itself. The rest of the programs goes further for the same price.
"""

from __future__ import annotations

from collections import Counter

from harness.operations import Program


class Turns:
    """Of one search. Every property has its turn until it has met a decisive step, and then on every ``every``-th
    program, and again on the same program (a search that repeats one must see the same thing)."""

    def __init__(self, every: int = 1) -> None:
        """Raises ValueError unless ``every`` is at least 1 (then all judge all)."""
        if every < 1:
            raise ValueError(f"every {every}th program means nothing")
        self._every = every
        self._rest: Counter[str] = Counter()  # of each property: how many programs it lets pass
        self._known: dict[tuple[str, Program], bool] = {}

    def has(self, prop: str, program: Program) -> bool:
        """Does the property of this id judge this program?"""
        key = prop, program
        if self._every > 1 and key not in self._known:
            self._known[key] = not self._rest[prop]
            self._rest[prop] -= bool(self._rest[prop])
        return self._known.get(key, True)

    def took(self, prop: str, decisive: int) -> None:
        """It judged, with that many decisive steps."""
        if decisive:
            self._rest[prop] = self._every - 1
