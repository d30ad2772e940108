"""What the harness costs: its wall time beside the bare forwards that it made, in one run.

Every program that a campaign executes (with its comparison runs) is kept and executed again without the harness: the
same model, caches and tokens, no probe, no ledger, no judging, no Hypothesis.  Prints per family: programs per second,
bare forwards per second, the ratio of the harness's wall time to that of the bare forwards, and how much of this ratio
are the two witnesses (one float64 forward and one forward without a cache, per program).  Then the same family in
JOBS processes at once, each with a seed of its own: programs per second of all together.

    python tests/bench/overhead.py [--profile quick] [--seed 0] [--jobs 2] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import mlx.core as mx
from tabulate import tabulate

import properties
from harness.campaign import run_campaign
from harness.judging import Evidence
from harness.operations import (
    BATCHES,
    EnforceMaxKvSize,
    Fork,
    Owner,
    Reset,
    Restore,
    Rollback,
    Snapshot,
    TrimFront,
    Verify,
)
from harness.profiles import PROFILES
from harness.steps import Step
from harness.tally import Tally
from harness.targets.reference import FAMILIES, ReferenceTarget, targets
from harness.workers import Died, in_processes
from reference_models.engine import BatchPool, CannotTrim, enforce_max_kv_size


class _Bench:
    """One execution again without the harness: seconds and number of its forwards."""

    def __init__(
        self, target: ReferenceTarget, models: dict[ReferenceTarget, object], owners: tuple[Owner, ...]
    ) -> None:
        key = ReferenceTarget(target.variant, weights_seed=target.weights_seed)
        if key not in models:
            models[key] = target.variant.build(target.weights_seed)
        self._model: Any = models[key]
        self._policy = target.policy
        self._pool = BatchPool()
        self._ids = [self._pool.open(target.make_caches(self._model), owner) for owner in owners]
        self.seconds, self.count = 0.0, 0

    def forward(self, caches: Sequence[Any], rows: Sequence[tuple[int, ...]]) -> None:
        lengths = [len(row) for row in rows]
        tokens = mx.array([[*row, *(0,) * (max(lengths) - len(row))] for row in rows])
        for cache in caches if min(lengths) < max(lengths) else ():
            cache.prepare(lengths)
        started = time.perf_counter()
        mx.eval(self._model(tokens, list(caches), self._policy))
        self.seconds += time.perf_counter() - started
        self.count += 1

    def alone(self, index: int, ids: tuple[int, ...]) -> None:
        self.forward(self._pool.forward_caches(self._ids[index]), [ids])

    def step(self, step: Step) -> None:
        with contextlib.suppress(CannotTrim):  # what a cache refuses changes nothing
            self._step(step)

    def _step(self, step: Step) -> None:
        operation, pool, seq = step.operation, self._pool, self._ids[step.operation.index]
        if (rows := tuple(self._ids[row] for row in step.rows)) != pool.rows:
            pool.batch(rows)
        if isinstance(operation, BATCHES):
            ids = [forward.seen.tokens for forward in step.forwards]
            for start in range(0, len(ids), max(1, len(rows))):
                self.forward(pool.batch_caches, ids[start : start + len(rows)])
            return
        for forward in step.forwards:
            self.alone(operation.index, forward.seen.tokens)
        if isinstance(operation, TrimFront):
            pool.trim_front(seq, operation.n, operation.keep)
        elif isinstance(operation, EnforceMaxKvSize):
            enforce_max_kv_size(pool, seq, operation.limit, operation.generation, operation.keep, operation.n_discard)
        elif isinstance(operation, (Rollback, Verify)):
            rejected = operation.n if isinstance(operation, Rollback) else operation.drafts - operation.accept
            pool.rollback(seq, rejected)
        elif isinstance(operation, Snapshot):
            pool.snapshot(seq, operation.slot)
        elif isinstance(operation, Restore):
            pool.restore(seq, operation.slot)
        elif isinstance(operation, Fork):
            pool.fork(seq, self._ids[operation.into])
        elif isinstance(operation, Reset):
            pool.reset(seq)  # what a file costs is no forward: a SaveLoad changes nothing


class _Bare(Tally):
    """Makes the forwards of every program again as soon as it ends, so that both sides meet the same machine load."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[ReferenceTarget, Any] = {}
        self.bare = 0.0
        self.forwards = 0
        self.witness = self.cache_free = 0.0  # seconds
        self.spent = 0.0  # by this class, to be taken off the campaign's wall time

    def on_end(self, evidence: Evidence) -> None:
        started = time.perf_counter()
        self.witness += evidence.witness_seconds.get("witness", 0)
        self.cache_free += evidence.witness_seconds.get("cache_free", 0)
        made = []
        for run in evidence.executions:
            assert isinstance(run.target, ReferenceTarget)
            made.append(_Bench(run.target, self.models, run.owners))
            for step in run.steps:
                made[-1].step(step)
        for _, _, forwards in evidence.__dict__.get("relived", ()):  # as far as somebody has asked for it
            assert isinstance(evidence.run.target, ReferenceTarget)
            made.append(_Bench(evidence.run.target, self.models, ("pool",)))
            for seen in forwards:
                made[-1].alone(0, seen.tokens)
        self.bare += sum(each.seconds for each in made)
        self.forwards += sum(each.count for each in made)
        self.spent += time.perf_counter() - started


def plain(family: str, profile: str, seed: int) -> tuple[int, float]:
    """Programs and seconds of a campaign that nothing else is measured of."""
    on = targets(family)
    for target in on:  # building is not what is measured
        target.open(("pool",)).forward(0, [1, 2])
    result = run_campaign(family, on, properties.ALL, PROFILES[profile], seed)
    return result.tally.coverage.programs, result.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--profile", choices=list(PROFILES), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    rows = []
    for family in arguments.families:
        warm = targets(family)
        alone = plain(family, arguments.profile, arguments.seed)
        calls = [(plain, (family, arguments.profile, arguments.seed + number)) for number in range(arguments.jobs)]
        together = [made for _, made in in_processes(calls, arguments.jobs) if not isinstance(made, Died)]
        bare = _Bare()
        result = run_campaign(family, warm, properties.ALL, PROFILES[arguments.profile], arguments.seed, also=bare)
        programs, wall = result.tally.coverage.programs, result.seconds - bare.spent
        rows.append(
            [
                family,
                programs,
                bare.forwards,
                f"{alone[0] / alone[1]:.1f}",
                f"{sum(count / seconds for count, seconds in together):.1f}",
                f"{bare.forwards / bare.bare:.0f}",
                f"{wall / bare.bare:.2f}",
                f"{bare.witness / bare.bare:.2f}",
                f"{bare.cache_free / bare.bare:.2f}",
            ]
        )
    headers = [
        "family",
        "programs",
        "forwards",
        "programs/s",
        f"in {arguments.jobs} processes",
        "bare forwards/s",
        "harness wall / bare wall",
    ]
    headers += ["of it float64 witness", "of it without a cache"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
