"""Positions: what RoPE, M-RoPE and position-dependent scales are given."""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import numpy as np

from harness.execution import Execution, ForwardStep, Step
from harness.findings import Violation
from harness.judging import Judgement, Property
from harness.target import Capability


class PositionsAreAbsolute(Property):
    id = "positions_are_absolute"
    sentence = "Every rotation and every position-dependent scale is given the absolute position of its token."
    decisive_when = "keys were trimmed from the front, so that the absolute position is not the number of keys"
    needs: ClassVar = frozenset({Capability.POSITIONS})

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            expected = np.asarray(forward.append.positions, np.float64)
            for number, call in enumerate(forward.seen.positions):
                given = np.asarray(call.positions, np.float64)
                if given.ndim == 0 or given.shape[-1] != len(expected):
                    return Judgement(
                        steps + 1,
                        decisive + 1,
                        violation=Violation(
                            step.index,
                            f"{call.kind} call {number}: it was given positions of shape {list(given.shape)} for "
                            f"{len(expected)} tokens",
                        ),
                    )
                wrong = np.argwhere(given != expected)
                if len(wrong):
                    at = tuple(int(i) for i in wrong[0])
                    return Judgement(
                        steps + 1,
                        decisive + 1,
                        worst=float(np.abs(given - expected).max()),
                        violation=Violation(
                            step.index,
                            f"{call.kind} call {number}: token {at[-1]} of the chunk stands at position "
                            f"{expected[at[-1]]:g}, it was given {given[at]:g} (offset {expected[0]:g}, "
                            f"{len(forward.append.held)} keys held)",
                        ),
                    )
            if forward.seen.positions:
                steps += 1
                decisive += len(forward.append.held) != forward.append.positions.start and _all_seen(run, forward)
        return Judgement(steps, decisive, worst=0.0 if steps else None)


def _all_seen(run: Execution, forward: ForwardStep) -> bool:
    """Does this forward show as many position calls of each kind as the first one of the run? Fewer means that
    something hides them, and then silence proves nothing."""
    first = next(f for step in run.steps for f in step.forwards)
    return Counter(c.kind for c in forward.seen.positions) == Counter(c.kind for c in first.seen.positions)
