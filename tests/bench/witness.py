"""What right models need of the tolerances, and what a witness costs.

Drawn configurations of every family, each with both storages. Logits of the model in float32 (cached, in chunks)
against the float64 witness: largest difference in deviations of the logits, of tokens that no near tie touches (the
strict tolerance judges them), also as a share of what that allows at its position, and of those that rounding may have
parted; the share of each; and the time of one witness forward beside one of MLX over the same tokens.

    python tests/bench/witness.py [--configurations 40] [--tokens 24] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

import numpy as np
from tabulate import tabulate

from harness.comparison import TOLERANCES, allowed
from harness.execution import execute
from harness.operations import Chunk, Decode, Prefill, Program, TrimFront
from harness.targets.reference import FAMILIES, ReferenceTarget, drawn_variants
from harness.targets.reference_caches import STORAGES
from harness.witnessing import completed, history


def measure(family: str, storage: Any, configurations: int, tokens: int) -> list[Any]:
    strict_worst = loose_worst = of_limit = 0.0
    strict_share, untold, count, asked, made = 0, 0, 0, 0.0, 0.0
    for number, variant in enumerate(drawn_variants(family, 1, configurations)):
        target = ReferenceTarget(variant, storage=storage, weights_seed=number)
        first = max(tokens // 2, 1)
        program = Program((Prefill(first), TrimFront(2), Chunk(max(tokens - first - 2, 1)), Decode(2)))
        run = execute(target, program, tell=False)
        told = history(run)
        assert told is not None
        target.witness(told), target.cache_free(told)  # neither builds anything from here on
        started = time.perf_counter()
        said = target.witness(told)
        between = time.perf_counter()
        target.cache_free(told)
        asked, made = asked + between - started, made + time.perf_counter() - between
        logits = np.concatenate([forward.seen.logits for forward in completed(run)])
        off = np.abs(logits - said.logits).max(axis=-1) / said.logits.std()
        limits, strict = allowed(said.dtype, told.positions, said.choice_gap, said.rounding_gap)
        loose = ~strict & np.isfinite(limits)
        strict_worst, loose_worst = (
            max(worst, float(off[which].max(initial=0)))
            for worst, which in ((strict_worst, strict), (loose_worst, loose))
        )
        of_limit = max(of_limit, float((off / limits)[strict].max(initial=0)))
        strict_share, untold, count = strict_share + strict.sum(), untold + np.isinf(limits).sum(), count + len(off)
    return [
        family,
        storage,
        configurations,
        f"{strict_worst:.1e}",
        f"{of_limit:.0%}",
        f"{strict_share / count:.0%}",
        f"{loose_worst:.1e}" if storage == "int8" else "",
        f"{untold / count:.1%}",
        f"{asked / configurations * 1e3:.2f}",
        f"{asked / made:.2f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--configurations", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=24)
    given = parser.parse_args()
    rows = [
        measure(family, storage, given.configurations, given.tokens)
        for family in given.families
        for storage in STORAGES
    ]
    headers = [
        "family",
        "storage",
        "configurations",
        "largest (strict)",
        "of what is allowed",
        "judged so",
        "largest (rounding)",
        "not judged",
        "witness, ms",
        "witness / MLX",
    ]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    print(f"tolerances: {TOLERANCES}")


if __name__ == "__main__":
    main()
