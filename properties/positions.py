"""Positions: what RoPE, M-RoPE and position-dependent scales are given."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from harness.execution import Execution
from harness.findings import Violation
from harness.judging import Judgement, Property, front_stays, positions_are_whole
from harness.oracle import of_layer
from harness.steps import Step
from harness.target import Capability, Target

_AXES = ("T", "H", "W")


class PositionsAreAbsolute(Property):
    id = "positions_are_absolute"
    sentence = "Every rotation and every position-dependent scale is given the absolute position of its token."
    decisive_when = (
        "keys are gone from the front of a cache, so that the position is not their number; where prompts hold "
        "images, one of them makes an M-RoPE id another number than the position"
    )
    needs: ClassVar = frozenset({Capability.POSITIONS})

    def never_decisive(self, target: Target) -> str | None:
        return None if target.images is not None else front_stays(target)  # images move ids away from positions

    def judge_step(self, run: Execution, step: Step) -> Judgement:
        steps = decisive = 0
        for forward in step.forwards:
            positions = np.asarray(forward.append.positions, np.float64)
            places = np.asarray(forward.append.places, np.float64).T[:, None]  # [3, 1, l]
            compared = 0
            for number, call in enumerate(forward.seen.positions):
                given = np.asarray(call.positions, np.float64)
                # One number broadcasts: it is every token's. A call of RoPE turns just the tokens it is given.
                if call.kind != "rope" and given.ndim and given.shape[-1] == 1:
                    given = np.broadcast_to(given, (*given.shape[:-1], len(positions)))
                if given.ndim == 0 or given.shape[-1] != len(positions):
                    continue  # a table of angles, say: which of them a token got is not to be seen here
                three = call.kind == "mrope" and given.ndim == 3 and given.shape[0] == 3
                expected = np.broadcast_to(places if three else positions, given.shape)
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
                            f"{call.kind} call {number}: token {at[-1]} of the chunk stands at "
                            f"{f'{_AXES[at[0]]} id' if three else 'position'} {expected[at]:g}, it was given "
                            f"{given[at]:g} (offset {positions[0]:g}, {len(forward.append.held)} keys held)",
                        ),
                    )
            if compared:
                steps += 1
                whole = compared == len(forward.seen.positions) and positions_are_whole(run, forward)
                start = forward.append.positions.start
                trimmed = any(len(of_layer(forward.append, rule).held) != start for rule in set(run.target.rules))
                decisive += whole and (trimmed if run.target.images is None else bool((places != positions).any()))
        return Judgement(steps, decisive, worst=0.0 if steps else None)
