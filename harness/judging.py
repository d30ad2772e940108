"""How a property judges: one step at a time while the program grows, or the whole run at its end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, Literal

from harness.comparison import recut_tolerance
from harness.emptying import Emptied
from harness.execution import Execution, execute, execute_numbered
from harness.findings import Violation
from harness.lives import Life, live_again, lives
from harness.oracle import Expected, History
from harness.retelling import Line, untrimmed, without_batches, without_rejected
from harness.steps import ForwardStep, Step
from harness.target import AttentionCall, Capability, ForwardObservation, Target
from harness.witnessing import history

ONE_BY_ONE = 24  # tokens of a life at most that are processed again one by one: each costs a forward


@dataclass(frozen=True)
class Judgement:
    """What a property says of a step or a run.

    ``steps``: how many things it looked at.  ``decisive``: how many of them could have told a right target from a
    wrong one.  ``worst``: the largest difference met, for properties that measure one.  ``inconclusive``: why a
    comparison says nothing.  ``kinds``: how many of the decisive ones were of which kinds, in words; one may be of
    several.
    """

    steps: int = 0
    decisive: int = 0
    worst: float | None = None
    violation: Violation | None = None
    inconclusive: str | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)


class Evidence:
    """A finished run and the runs it is compared with, each executed at most once however many properties ask."""

    def __init__(self, run: Execution) -> None:
        self.run = run
        self.witness_seconds: dict[str, float] = {}  # what each of the two witnesses took

    @cached_property
    def repeat(self) -> Execution:
        """The same program again on the same target, in a fresh session, with the values of its attention calls."""
        return execute(self.run.target, self.run.program, tell=False, attention=True)

    @cached_property
    def untrimmed(self) -> list[int]:
        """Indices of the steps on which no front trim has any bearing (see ``retelling.untrimmed``)."""
        return untrimmed(self.run.steps)

    @cached_property
    def counterpart(self) -> Execution | None:
        """The untrimmed steps again under the other mask policy; None if the target has no counterpart."""
        return self._under_the_other_policy()

    @cached_property
    def counterpart_again(self) -> Execution | None:
        """Once more: its own A/A control, for whoever has found that it differs."""
        return self._under_the_other_policy()

    def _under_the_other_policy(self) -> Execution | None:
        other = self.run.target.counterpart()
        if other is None:
            return None
        steps = [self.run.steps[i] for i in self.untrimmed]
        return execute_numbered(other, self.run.owners, [(s.operation, s.numbers, s.rows) for s in steps])

    @cached_property
    def without_rejected(self) -> list[Line]:
        """The run without the tokens that it rolled back."""
        return without_rejected(self.run.owners, self.run.steps)

    @cached_property
    def unspeculated(self) -> Execution:
        """Those lines executed."""
        lines = [line.numbered for line in self.without_rejected]
        return execute_numbered(self.run.target, self.run.owners, lines)

    @cached_property
    def without_batches(self) -> list[Line]:
        """The run with every sequence by itself."""
        return without_batches(self.run.steps)

    @cached_property
    def solo(self) -> Execution:
        """Those lines executed."""
        lines = [line.numbered for line in self.without_batches]
        return execute_numbered(self.run.target, self.run.owners, lines)

    @cached_property
    def relived(self) -> list[tuple[Life, int, list[ForwardObservation]]]:
        """The longest untrimmed life of every sequence again, in forwards of how many tokens: all at once and, where
        there are not too many, one by one."""
        made = []
        for life in lives(self.run.owners, self.run.steps):
            sizes = (len(life.spots), 1) if len(life.spots) <= ONE_BY_ONE else (len(life.spots),)
            made += [(life, size, live_again(self.run.target, life, size)) for size in sizes]
        return made

    @cached_property
    def history(self) -> History | None:
        """All tokens that the run processed, as one forward; None if there are none."""
        return history(self.run)

    @cached_property
    def witness(self) -> Expected | None:
        """What the target's independent witness expects; None without one, or without a token."""
        return self._ask(Capability.WITNESS, "witness", self.run.target.witness)

    @cached_property
    def cache_free(self) -> Expected | str | None:
        """What the target's model gives without a cache, or the error that it raised; None as above."""
        try:
            return self._ask(Capability.CACHE_FREE, "cache_free", self.run.target.cache_free)
        except Exception as failure:  # as in a session: what a model raises is an observation
            return f"{type(failure).__name__}: {failure}"

    def _ask(self, needed: Capability, name: str, whom: Callable[[History], Expected]) -> Expected | None:
        if self.history is None or needed not in self.run.target.capabilities:
            return None
        started = time.perf_counter()
        expected = whom(self.history)
        self.witness_seconds[name] = time.perf_counter() - started
        return self.history.of_run(expected)

    @property
    def emptied(self) -> Emptied | None:
        """What is left of the run itself once its sequences and slots are emptied, which nobody can go on with; None
        where it stopped: nothing more can be asked of it."""
        return None if self.run.stopped else self.run.emptied

    @property
    def executions(self) -> tuple[Execution, ...]:
        """The run and those comparisons that were really executed (for counting what they cost)."""
        made = [self.run]
        for name in ("repeat", "counterpart", "counterpart_again", "unspeculated", "solo"):
            other = self.__dict__.get(name)
            if other is not None:
                made.append(other)
        return tuple(made)

    @property
    def other_forwards(self) -> tuple[ForwardObservation, ...]:
        """Forwards that were made outside these executions."""
        return tuple(seen for _, _, forwards in self.__dict__.get("relived", ()) for seen in forwards)


Felt = Literal["context", "trims"]
"""What the logits of a target must depend on: the tokens before, and what a front trim leaves of them."""


class Property:
    """Base of all properties. A subclass states ``id`` and ``sentence`` and overrides one of the two judges."""

    id: ClassVar[str]
    sentence: ClassVar[str]
    decisive_when: ClassVar[str]
    needs: ClassVar[frozenset[Capability]] = frozenset()
    feels: ClassVar[frozenset[Felt]] = frozenset()  # without which it could not have failed: see ``harness.felt``
    runs_again: ClassVar[bool] = False  # it has the program executed another time: see ``harness.turns``

    def never_decisive(self, target: Target) -> str | None:
        """Why nothing that this target does can ever be decisive; None where something can. It is judged all the
        same."""
        return None

    def judge_step(self, run: Execution, step: Step) -> Judgement | None:
        """Judge one step just applied; None if it says nothing about steps."""
        return None

    def judge_run(self, evidence: Evidence) -> Judgement | None:
        """Judge a finished run; None if it says nothing about runs."""
        return None

    def may_decide(self, evidence: Evidence) -> bool:
        """Can this run be decisive at all, by what is known without running it again? Asked where ``runs_again``: a
        program that has nothing to show takes nobody's turn."""
        return True


def recut_limit(run: Execution) -> float:
    """``comparison.recut_tolerance`` of all storages from which a program has read."""
    read = {forward.append.storage for step in run.steps for forward in step.forwards}
    return recut_tolerance(run.target.identity.storage, *read)


def front_stays(target: Target) -> str | None:
    """Why no cache of this target ever loses its oldest keys; None where one does."""
    if Capability.FRONT_TRIM in target.capabilities or any(rule is not None and rule.forgets for rule in target.rules):
        return None
    return "nothing ever leaves the front of the target's caches"


def nothing_is_removed(target: Target) -> str | None:
    """Why no operation removes a key from a sequence of this target; None where one does."""
    if Capability.FRONT_TRIM in target.capabilities:
        return None
    if Capability.ROLLBACK not in target.capabilities:
        return "the target can neither trim nor roll back"
    states = any(rule is not None and rule.states for rule in target.rules)
    return "states cannot go back, so that every rollback is refused" if states else None


def attention_calls(run: Execution, forward: ForwardStep) -> Iterator[tuple[int, AttentionCall]]:
    """(model layer, call) of a forward, or nothing where the calls cannot be told apart.

    A forward that shows fewer calls than the model has attention layers (something hides them) or more (an encoder
    runs in the same forward) cannot be mapped to layers, so it is never judged and never decisive.  A forward that
    raised shows the calls up to the one that broke, in order.
    """
    layers, calls = run.target.attention_layers, forward.seen.attention
    whole = len(calls) == len(layers)
    broken = forward.seen.error is not None and len(calls) <= len(layers)
    if whole or broken:
        yield from zip(layers, calls, strict=False)


def positions_are_whole(run: Execution, forward: ForwardStep) -> bool:
    """Does this forward show as many position calls of each kind as the first one of the run? Fewer means that
    something hides them, and then silence proves nothing."""
    first = next(f for step in run.steps for f in step.forwards)
    return _kinds(forward) == _kinds(first)


def _kinds(forward: ForwardStep) -> Counter[str]:
    return Counter(call.kind for call in forward.seen.positions)


def is_blind(run: Execution, forward: ForwardStep) -> bool:
    """Did a forward that completed hide something: another number of attention calls than the model has attention
    layers, or fewer position calls than the first forward of the run?"""
    if forward.seen.error is not None:
        return False
    return len(forward.seen.attention) != len(run.target.attention_layers) or not positions_are_whole(run, forward)
