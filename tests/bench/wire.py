"""What the wire costs: the same programs on an engine in this process and in another one, in one run.

Programs of an ordinary campaign are executed again, with all that is told of caches, in this process and through
``harness.wire.worker`` in turns.  Prints per configuration: programs, operations, requests for each operation, seconds
of either and their ratio; then the same for operations alone, without anything told.

    python tests/bench/wire.py [--profile quick] [--seed 0] [--rounds 3] [FAMILY ...]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

from tabulate import tabulate

from harness.campaign import run_campaign
from harness.capability import Capability, needs
from harness.execution import execute
from harness.judging import Evidence
from harness.operations import Program
from harness.profiles import PROFILES
from harness.tally import Tally
from harness.target import Target
from harness.targets.naming import Asked, resolve
from harness.wire.engine import Engine


class _Programs(Tally):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Program] = []

    def on_end(self, evidence: Evidence) -> None:
        self.kept.append(evidence.run.program)


def _seconds(target: Target, programs: Sequence[Program], tell: bool) -> float:
    started = time.perf_counter()
    for program in programs:
        execute(target, program, tell=tell)
    return time.perf_counter() - started


def _row(name: str, programs: Sequence[Program], rounds: int, tell: bool) -> list[Any]:
    here = resolve(f"reference:{name}", Asked()).targets[0]
    subject = resolve(f"wire:{sys.executable} -m harness.wire.worker reference:{name}", Asked())
    there = subject.targets[0]
    engine: Engine = there.engine  # type: ignore[attr-defined]
    for target in (here, there):  # what is built or compiled once
        _seconds(target, programs[:5], tell)
    sent = engine.number
    spent = dict.fromkeys((here, there), 0.0)
    for _ in range(rounds):
        for target in spent:
            spent[target] += _seconds(target, programs, tell)
    subject.close()
    operations = sum(len(program.operations) for program in programs)
    requests = (engine.number - sent) / (operations * rounds)
    ratio = spent[there] / spent[here]
    numbers = (f"{number:.2f}" for number in (requests, spent[here], spent[there], ratio))
    return [name, "all told" if tell else "operations alone", len(programs), operations, *numbers]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=["qwen2_vl:plain", "nemotron_nas:plain", "qwen3_vl_moe:plain"])
    parser.add_argument("--profile", choices=list(PROFILES), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for name in arguments.families:
        drawn = _Programs()
        target = resolve(f"reference:{name}", Asked()).targets[0]
        run_campaign(name, [target], [], PROFILES[arguments.profile], arguments.seed, also=drawn)
        able = [
            program for program in drawn.kept if Capability.QUANTISE not in needs(program)
        ]  # what goes over the wire
        rows += [_row(name, able, arguments.rounds, tell) for tell in (True, False)]
    headers = [
        "configuration",
        "what",
        "programs",
        "operations",
        "requests/operation",
        "here s",
        "wire s",
        "wire / here",
    ]
    print(tabulate(rows, headers=headers, tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
