"""Positions: what RoPE, M-RoPE and position-dependent scales are given."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from harness.execution import Execution, Step
from harness.findings import Violation
from harness.judging import Judgement, Property, positions_are_whole
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
            compared = 0
            for number, call in enumerate(forward.seen.positions):
                given = np.asarray(call.positions, np.float64)
                if given.ndim == 0 or given.shape[-1] != len(expected):
                    continue  # a table of angles, say: which of them a token got is not to be seen here
                compared += 1
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
            if compared:
                steps += 1
                whole = compared == len(forward.seen.positions) and positions_are_whole(run, forward)
                decisive += whole and len(forward.append.held) != forward.append.positions.start
        return Judgement(steps, decisive, worst=0.0 if steps else None)
