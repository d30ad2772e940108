"""The tokens that a sequence processed while nothing was trimmed from it, so that they can be processed again in one
forward, or one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from harness.operations import Fork, Owner, QuantizeCache, Reset, Restore, Rollback, Snapshot, Verify
from harness.rules import QuantisedStorage
from harness.steps import ForwardStep, Step
from harness.target import ForwardObservation, PromptInput, Target


@dataclass(frozen=True)
class Spot:
    """Where the run processed a token: row ``row`` of a forward of its step ``step``."""

    step: int
    forward: ForwardStep
    row: int


@dataclass(frozen=True)
class Life:
    """The tokens that a sequence holds, by position from 0 on, and the prompt with images that it was given.
    ``storage``: of its rows, from the first on."""

    sequence: int
    spots: tuple[Spot, ...] = ()
    prompt: PromptInput | None = None
    storage: str = "rows"

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(spot.forward.seen.tokens[spot.row] for spot in self.spots)

    @property
    def forwards(self) -> int:
        """How many forwards it took."""
        return len({id(spot.forward) for spot in self.spots})


def lives(owners: tuple[Owner, ...], steps: Sequence[Step]) -> list[Life]:
    """Of every sequence the longest life of more than one forward, if there is any.

    A life ends with a front trim, with a rollback into a prompt with images (half an image cannot be read), where what
    it holds is quantised, and where another state takes its place; a Restore or a Fork goes on with the life that it
    copied.
    """
    storage = steps[0].before.storage if steps else "rows"
    now: list[Life | None] = [Life(number, storage=storage) for number in range(len(owners))]
    slots: dict[int, Life | None] = {}
    ended: list[Life | None] = []
    for step in steps:
        operation, index = step.operation, step.operation.index
        if step.error is not None:
            break
        for forward in step.forwards:
            life = now[forward.sequence]
            if life is not None:
                spots = (Spot(step.index, forward, row) for row in range(len(forward.append.positions)))
                now[forward.sequence] = replace(life, spots=(*life.spots, *spots), prompt=forward.prompt or life.prompt)
        life = now[index]
        if step.expected_removed:
            ended.append(life)
            whole = isinstance(operation, (Rollback, Verify)) and step.after.offset >= step.before.read
            life = replace(life, spots=life.spots[: step.after.offset]) if whole and life is not None else None
        if step.effective and isinstance(operation, QuantizeCache):
            ended.append(life)
            life = None if life is None or life.spots else replace(life, storage=operation.storage)
        now[index] = life
        if step.effective and isinstance(operation, Snapshot):
            slots[operation.slot] = life
        if step.replaced is not None:
            ended.append(now[step.replaced])
            source = slots[operation.slot] if isinstance(operation, Restore) else life
            source = Life(index, storage=step.after.storage) if isinstance(operation, Reset) else source
            now[step.replaced] = source and replace(source, sequence=step.replaced)
        assert step.replaced is None or isinstance(operation, (Restore, Reset, Fork))
    best: dict[int, Life] = {}
    for candidate in (*ended, *now):
        if candidate is None or candidate.forwards < 2:
            continue
        if candidate.sequence not in best or len(candidate.spots) > len(best[candidate.sequence].spots):
            best[candidate.sequence] = candidate
    return [best[number] for number in sorted(best)]


def live_again(target: Target, life: Life, size: int) -> list[ForwardObservation]:
    """Process the tokens of a life in a fresh session, ``size`` of them in a forward, up to the first error."""
    session, tokens = target.open(("pool",)), life.tokens
    seen: list[ForwardObservation] = []
    if life.storage != target.row_storage:
        session.quantise(0, cast(QuantisedStorage, life.storage))
    for start in range(0, len(tokens), size):
        seen.append(session.forward(0, tokens[start : start + size], life.prompt if start == 0 else None))
        if seen[-1].error is not None:
            break
    return seen
