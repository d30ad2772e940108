"""How often drawn programs get deep: of those that a profile draws, the share that reaches each of a few states.

Programs are drawn for all that a run of the family judges, as the run draws them, and applied without a judge.

* ``window``: a key fell out of a sliding window, or out of what a cache keeps by its rule (of programs on targets with
  either)
* ``256 slots``: a cache grew past 256 slots
* ``cut image``: a trim or a rollback cut an image, or a forward began inside one (of programs with images)
* ``zero``: a front trim left nothing, and the sequence went on
* ``two trims``: a rollback behind two front trims ended where the last of them was made, or at the first key held

    python tests/bench/depths.py [--profile quick] [--seed 0] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import os
from collections import Counter

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

from tabulate import tabulate

from harness.campaign import run_campaign
from harness.execution import Execution
from harness.judging import Evidence
from harness.operations import Rollback, Verify
from harness.profiles import PROFILES
from harness.runner import family_targets
from harness.steps import Step
from harness.tally import GROWTH, Coverage, Tally
from harness.targets.reference import FAMILIES, paths

CUTS = ("trim_cut_image", "chunk_cut_image", "rolled_back_into_image")
STATES = ("window", "256 slots", "cut image", "zero", "two trims")


def deep(run: Execution) -> set[str]:
    """Which of the states the run reached, but for images."""
    windows = [window for window in run.target.windows if window is not None]
    met = {"window"} if any(step.after.forgotten for step in run.steps) else set()
    empty: set[int] = set()  # sequences without a key since a front trim
    trims: dict[int, list[int]] = {}  # of every sequence: the offsets of its front trims
    for step in run.steps:
        index, rolled = step.operation.index, isinstance(step.operation, (Rollback, Verify))
        for forward in step.forwards:
            seen = (*forward.append.held, *forward.append.positions)
            if any(seen[0] <= seen[-1] - window for window in windows):
                met.add("window")
            if forward.sequence in empty:
                met.add("zero")
                empty.discard(forward.sequence)
        if step.before.live_len <= GROWTH < step.after.live_len:
            met.add("256 slots")
        if step.replaced is not None:
            empty.discard(step.replaced)
            trims.pop(step.replaced, None)
        if step.expected_removed and not rolled:
            trims.setdefault(index, []).append(step.before.offset)
            if not step.after.live_len:
                empty.add(index)
        elif step.expected_removed and _came_back(step, trims.get(index, [])):
            met.add("two trims")
    return met


def _came_back(step: Step, trims: list[int]) -> bool:
    return len(trims) > 1 and (step.after.offset == trims[-1] or not step.after.live_len)


class _Depths(Tally):
    """Counts states, and the programs that could have reached them."""

    def __init__(self) -> None:
        super().__init__()
        self.met: Counter[str] = Counter()
        self.could: Counter[str] = Counter()

    def on_end(self, evidence: Evidence) -> None:
        run, before = evidence.run, self.coverage.to_json()
        super().on_end(evidence)
        after = self.coverage.to_json()
        new = {name for name in after if after[name] > before[name]}
        self.met.update(deep(run) | ({"cut image"} if new.intersection(CUTS) else set()))
        can = {"256 slots", "zero", "two trims"} | ({"cut image"} if "with_images" in new else set())
        self.could.update(can | ({"window"} if any(run.target.windows) or any(run.target.rules) else set()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--profile", choices=list(PROFILES), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    profile, seed = PROFILES[arguments.profile], arguments.seed
    rows = []
    for family, path in [(name, path) for name in arguments.families for path in paths(name)]:
        seen = _Depths()
        run_campaign(family, family_targets(family, "live", profile, seed, path), [], profile, seed, also=seen)
        cover: Coverage = seen.coverage
        shares = [f"{seen.met[s] / seen.could[s]:.0%}" if seen.could[s] else "" for s in STATES]
        each = [cover.operations / cover.programs, cover.forwards / cover.programs]
        name = family if path == "text" else f"{family}+{path}"
        rows.append([name, cover.programs, *(f"{count:.1f}" for count in each), *shares])
    headers = ["family", "programs", "operations each", "forwards each", *STATES]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
