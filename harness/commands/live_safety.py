"""Is the mask of a family right behind a front trim? A table of the families of mlx-lm, on our caches.

``kv-harness live-safety [--only A,B] [--programs N] [--json]``
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from harness.commands import UsageError

Answer = Literal["yes", "no", "not shown", "not applicable"]

DECISIVE = ("mask_key_axis_equals_live_keys", "mask_shows_exactly_the_visible_set", "positions_are_absolute")
"""What a front trim puts to the test; the first two must have been decisive for a yes."""
ALSO = (
    "keys_equal_ledger_live_length",
    "cached_rows_stay_what_they_were",
    "every_operation_completes",
    "every_forward_gives_finite_logits",
    "outputs_equal_the_cache_free_forward",
)
COLUMNS = ("family", "variant", "owner", "caches", "attention", "mask length", "live-safe", "evidence")


@dataclasses.dataclass(frozen=True)
class Row:
    """A configuration of a family. ``decisive``: steps of each of DECISIVE; ``found``: property and shrunk program of
    every finding; ``reason``: of whatever is not a plain yes or no."""

    family: str
    variant: str
    owner: str
    caches: str
    attention: str
    mask_length: str
    live_safe: Answer
    decisive: dict[str, int]
    programs: int
    found: dict[str, str]
    reason: str = ""

    @property
    def evidence(self) -> str:
        """In one line."""
        if self.found:
            return "; ".join(f"{name}: {program}" for name, program in self.found.items())
        steps = ", ".join(f"{name} {count}" for name, count in self.decisive.items())
        parts = [f"decisive steps in {self.programs} programs: {steps}" if self.programs else "", self.reason]
        return "; ".join(part for part in parts if part)

    def cells(self) -> tuple[str, ...]:
        """As COLUMNS."""
        facts = (self.family, self.variant, self.owner, self.caches, self.attention, self.mask_length)
        return (*facts, self.live_safe, self.evidence)


def rows(families: Sequence[str], programs: int, seed: int) -> Iterator[Row]:
    """One for every configuration of these families (model types), as they are judged."""
    from harness.targets import mlx_lm

    for family in families:
        for target in mlx_lm.resolve(f"mlx_lm:{family}"):
            if target.trims_itself:
                yield _row(target, "not applicable", reason=mlx_lm.TRIMS_ITSELF)
            else:
                yield _judged(dataclasses.replace(target, caches=mlx_lm.LIVE_WINDOW), programs, seed)


def _judged(target: Any, programs: int, seed: int) -> Row:
    from harness.campaign import run_campaign
    from harness.profiles import PROFILES
    from properties import BY_ID

    profile = dataclasses.replace(PROFILES["quick"], programs=programs, asked=True)
    properties = [BY_ID[name] for name in (*DECISIVE, *ALSO)]
    result = run_campaign(target.identity.full_name, [target], properties, profile, seed)
    steps = {each.id: each.tally.decisive_steps for each in result.properties if each.id in DECISIVE}
    found = {bug.finding.property_id: str(bug.finding.program) for bug in result.found}
    answer: Answer = "no" if found else "yes" if all(steps[name] for name in DECISIVE[:2]) else "not shown"
    reason = "of its attention; a state has no keys to trim" if target.has_states else ""
    return _row(target, answer, steps, result.tally.coverage.programs, found, reason)


def _row(
    target: Any,
    answer: Answer,
    steps: dict[str, int] | None = None,
    programs: int = 0,
    found: dict[str, str] | None = None,
    reason: str = "",
) -> Row:
    from harness.targets.mlx_lm_facts import facts

    seen = facts(target)
    told = seen.owner, seen.caches, seen.attention, seen.mask_length
    return Row(target.model_type, target.variant, *told, answer, steps or {}, programs, found or {}, reason)


def register(commands: Any) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser("live-safety", help="which families of mlx-lm can live with a front trim?")
    parser.set_defaults(act=act)
    parser.add_argument("--only", metavar="A,B", help="model types, comma-separated; default: all of the catalogue")
    parser.add_argument("--programs", type=int, default=40, metavar="N", help="of each configuration (default: 40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", action="store_true", help="one JSON object a line in the place of the table")


def act(arguments: argparse.Namespace) -> int:
    """Print the table. UsageError for a family that is not known, and without mlx-lm."""
    try:
        from harness.targets.mlx_lm import NotInstalled, UnknownFamily
        from harness.targets.mlx_lm_catalogue import FAMILIES, WITHOUT_ENTRY, unknown
    except ImportError as error:
        raise UsageError(f"MLX cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'") from error
    known = [*FAMILIES, *WITHOUT_ENTRY]
    chosen = known if arguments.only is None else [name.strip() for name in arguments.only.split(",")]
    if odd := [name for name in chosen if name not in known]:
        raise UsageError(f"argument --only: {unknown(odd[0], known, 'mlx_lm')}")
    if not 1 <= arguments.programs <= 100_000:
        raise UsageError(f"argument --programs: must lie in [1, 100000], got {arguments.programs}")
    try:
        if not arguments.json:
            print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        for row in rows(chosen, arguments.programs, arguments.seed):
            line = json.dumps(dataclasses.asdict(row)) if arguments.json else f"| {' | '.join(row.cells())} |"
            print(line, flush=True)
    except (UnknownFamily, NotInstalled) as error:
        raise UsageError(str(error)) from error
    return 0
