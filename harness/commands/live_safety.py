"""Is the mask of a family right behind a front trim? A table of the model types of mlx-lm, on our caches: those
of which there is a configuration here, and every other one that the installed release ships.

``kv-harness live-safety [--only A,B] [--programs N] [--json]``
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, get_args

from harness.commands import UsageError

Answer = Literal["yes", "no", "not shown", "not applicable", "not judged"]
NO_CONFIGURATION = "no configuration of it here"

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
    """A configuration of a family, or a family of which none could be judged: of that one nothing is known but the
    ``reason``, which there is of whatever is not a plain yes or no. ``decisive``: steps of each of DECISIVE; ``found``:
    property and shrunk program of every finding."""

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
        """As COLUMNS; what is not known is a dash."""
        facts = (self.family, self.variant, self.owner, self.caches, self.attention, self.mask_length)
        return (*(fact or "-" for fact in facts), self.live_safe, self.evidence)


def rows(families: Sequence[str], programs: int, seed: int) -> Iterator[Row]:
    """One for every configuration of these families (model types), as they are judged; one of a family that has none,
    or that this release has not or cannot build, and the others go on. NotInstalled where there is no mlx-lm."""
    from harness.targets import mlx_lm
    from harness.targets.mlx_lm_catalogue import FAMILIES, WITHOUT_ENTRY

    mlx_lm.version()
    for family in families:
        if family not in FAMILIES:
            yield _not_judged(family, WITHOUT_ENTRY.get(family, NO_CONFIGURATION))
            continue
        try:
            targets = mlx_lm.resolve(f"mlx_lm:{family}")
        except (mlx_lm.UnknownFamily, mlx_lm.NotInstalled) as error:
            yield _not_judged(family, str(error))
            continue
        for target in targets:
            if not target.has_keys:
                yield _row(target, "not applicable", reason=mlx_lm.NO_KEYS)
            elif target.trims_itself:
                yield _row(target, "not applicable", reason=mlx_lm.TRIMS_ITSELF)
            else:
                yield _judged(dataclasses.replace(target, caches=mlx_lm.LIVE_WINDOW), programs, seed)


def all_families() -> tuple[str, ...]:
    """The model types of the catalogue, and the modules that the installed mlx-lm has beside them, found in its
    package. NotInstalled where there is none."""
    from harness.targets.mlx_lm_catalogue import FAMILIES, WITHOUT_ENTRY
    from harness.targets.mlx_lm_models import shipped

    modules = {one.module or family for family, configurations in FAMILIES.items() for one in configurations}
    known = {*FAMILIES, *WITHOUT_ENTRY}
    return (*FAMILIES, *WITHOUT_ENTRY, *(name for name in shipped() if name not in modules | known))


def summary(seen: Iterable[Row]) -> str:
    """How many rows have which answer, in one line."""
    answers = Counter(row.live_safe for row in seen)
    counted = ", ".join(f"{answers[answer]} {answer}" for answer in get_args(Answer))
    return f"{answers.total()} rows: {counted}"


def _not_judged(family: str, reason: str) -> Row:
    return Row(family, "", "", "", "", "", "not judged", {}, 0, {}, reason)


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
    parser.add_argument("--only", metavar="A,B", help="model types, comma-separated; default: all")
    parser.add_argument("--programs", type=int, default=40, metavar="N", help="of each configuration (default: 40)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="default: 0")
    parser.add_argument("--json", action="store_true", help="one JSON object a line in the place of the table")


def act(arguments: argparse.Namespace) -> int:
    """Print the table, and how many rows have which answer. UsageError for a family that is not known, and without
    mlx-lm."""
    try:
        from harness.targets.mlx_lm import NotInstalled
        from harness.targets.mlx_lm_catalogue import unknown
    except ImportError as error:
        raise UsageError(f"MLX cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'") from error
    if not 1 <= arguments.programs <= 100_000:
        raise UsageError(f"argument --programs: must lie in [1, 100000], got {arguments.programs}")
    try:
        known = all_families()
        chosen = known if arguments.only is None else [name.strip() for name in arguments.only.split(",")]
        if odd := [name for name in chosen if name not in known]:
            raise UsageError(f"argument --only: {unknown(odd[0], known, 'mlx_lm')}")
        if not arguments.json:
            print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        seen = []
        for row in rows(chosen, arguments.programs, arguments.seed):
            seen.append(row)
            line = json.dumps(dataclasses.asdict(row)) if arguments.json else f"| {' | '.join(row.cells())} |"
            print(line, flush=True)
        if not arguments.json:
            print(f"\n{summary(seen)}")
    except NotInstalled as error:
        raise UsageError(str(error)) from error
    return 0
