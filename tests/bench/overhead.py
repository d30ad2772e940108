"""What the harness costs: its wall time beside the bare forwards that it made, in one run.

Every program that a campaign executes (with its comparison runs) is kept and executed again without the harness: the
same model, caches and tokens, no probe, no ledger, no judging, no Hypothesis.  Prints per family: programs per second,
bare forwards per second, the ratio of the harness's wall time to that of the bare forwards, and how much of this ratio
are the two witnesses (one float64 forward and one forward without a cache, per program).

    python tests/bench/overhead.py [--profile quick] [--seed 0] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import os
import time

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import mlx.core as mx
from tabulate import tabulate

import properties
from harness.campaign import run_campaign
from harness.execution import Execution
from harness.images import token_ids
from harness.judging import Evidence
from harness.operations import Chunk, Decode, EnforceMaxKvSize, Prefill, Rollback, TrimFront
from harness.profiles import PROFILES
from harness.tally import Tally
from harness.targets.reference import FAMILIES, ReferenceTarget, targets
from reference_models.engine import CachePool, enforce_max_kv_size


def bare_seconds(run: Execution, models: dict[ReferenceTarget, object]) -> tuple[float, int]:
    """Seconds and number of the forwards of one execution, made again without the harness."""
    target = run.target
    assert isinstance(target, ReferenceTarget)
    key = ReferenceTarget(target.variant, weights_seed=target.weights_seed)
    if key not in models:
        models[key] = target.variant.build(target.weights_seed)
    model = models[key]
    pool = CachePool()
    ids = [pool.open(target.make_caches(model), owner) for owner in run.owners]
    processed = [0] * len(ids)
    seconds, count = 0.0, 0
    for step in run.steps:
        operation, index = step.operation, step.operation.index
        if isinstance(operation, (Prefill, Chunk, Decode)):
            sizes = [1] * operation.times if isinstance(operation, Decode) else [operation.tokens]
            for size in sizes:
                tokens = mx.array([token_ids(index, size, processed[index], target.vocab_size)])
                processed[index] += size
                started = time.perf_counter()
                mx.eval(model(tokens, list(pool.forward_caches(ids[index])), target.policy))  # type: ignore[operator]
                seconds += time.perf_counter() - started
                count += 1
        elif isinstance(operation, TrimFront):
            pool.trim_front(ids[index], operation.n, operation.keep)
        elif isinstance(operation, Rollback):
            pool.rollback(ids[index], operation.n)
        elif isinstance(operation, EnforceMaxKvSize):
            enforce_max_kv_size(
                pool, ids[index], operation.limit, operation.generation, operation.keep, operation.n_discard
            )
    return seconds, count


class _Bare(Tally):
    """Makes the forwards of every program again as soon as it ends, so that both sides meet the same machine load."""

    def __init__(self) -> None:
        super().__init__()
        self.models: dict[ReferenceTarget, object] = {}
        self.bare = 0.0
        self.forwards = 0
        self.witness = self.cache_free = 0.0  # seconds
        self.spent = 0.0  # by this class, to be taken off the campaign's wall time

    def on_end(self, evidence: Evidence) -> None:
        started = time.perf_counter()
        self.witness += evidence.witness_seconds.get("witness", 0)
        self.cache_free += evidence.witness_seconds.get("cache_free", 0)
        for run in evidence.executions:
            seconds, forwards = bare_seconds(run, self.models)
            self.bare += seconds
            self.forwards += forwards
        self.spent += time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--profile", choices=list(PROFILES), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for family in arguments.families:
        warm = targets(family)
        for target in warm:  # building is not what is measured
            target.open(("pool",)).forward(0, [1, 2])
        bare = _Bare()
        result = run_campaign(family, warm, properties.ALL, PROFILES[arguments.profile], arguments.seed, also=bare)
        programs, wall = result.tally.coverage.programs, result.seconds - bare.spent
        rows.append(
            [
                family,
                programs,
                bare.forwards,
                f"{programs / wall:.1f}",
                f"{bare.forwards / bare.bare:.0f}",
                f"{wall / bare.bare:.2f}",
                f"{bare.witness / bare.bare:.2f}",
                f"{bare.cache_free / bare.bare:.2f}",
            ]
        )
    headers = ["family", "programs", "forwards", "programs/s", "bare forwards/s", "harness wall / bare wall"]
    headers += ["of it float64 witness", "of it without a cache"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
