"""The main claim over many seeds: the offset mask is found and made small, the live mask passes every property.

    python tests/bench/seeds.py [--seeds 20] [--profile quick] [FAMILY ...]

Prints a row per family and path and exits 1 unless every seed of every family did what it should.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")

from tabulate import tabulate

import properties
from harness.campaign import run_campaign
from harness.findings import Verdict
from harness.profiles import PROFILES
from harness.runner import family_targets, report_name
from harness.targets.reference import FAMILIES, paths

WANTED = "mask_key_axis_equals_live_keys"
LONGEST = 3  # operations of a shrunk program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--profile", choices=list(PROFILES), default="quick")
    arguments = parser.parse_args()
    profile = PROFILES[arguments.profile]
    rows, failed = [], 0
    runs = [(family, path) for family in arguments.families for path in paths(family)]
    for family, path in runs:
        name = report_name(family, path)
        caught, longest, latest, clean, programs, fewest = 0, 0, 0, 0, 0, None
        for seed in range(arguments.seeds):
            targets = family_targets(family, "offset", profile, seed, path)
            wrong = run_campaign(name, targets, properties.ALL, profile, seed)
            mask = [bug for bug in wrong.found if bug.finding.property_id == WANTED]
            if mask and len(mask[0].finding.program.operations) <= LONGEST:
                caught += 1
                longest = max(longest, len(mask[0].finding.program.operations))
                latest = max(latest, mask[0].after)
            targets = family_targets(family, "live", profile, seed, path)
            right = run_campaign(name, targets, properties.ALL, profile, seed)
            clean += right.verdict is Verdict.PASS
            programs += right.tally.coverage.programs
            least = min(row.tally.decisive_steps for row in right.properties)
            fewest = least if fewest is None else min(fewest, least)
        failed += caught != arguments.seeds or clean != arguments.seeds
        rows.append(
            [
                name,
                f"{caught}/{arguments.seeds}",
                latest,
                longest,
                f"{clean}/{arguments.seeds}",
                programs,
                fewest,
            ]
        )
        print(f"{name}: done", file=sys.stderr, flush=True)
    headers = [
        "family",
        "offset mask found",
        "after programs (most)",
        "operations (most)",
        "live mask passes",
        "programs",
        "decisive steps (fewest of any property and seed)",
    ]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
