"""Is the mask of a family right behind a front trim? A table of the model types of mlx-lm, on our caches: those
of which there is a configuration here, and every other one that the installed release ships.

``kv-harness live-safety [--only A,B] [--programs N] [--json] [--out DIR] [--jobs N]``
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from harness.commands import UsageError, folder, jobs_option

Answer = Literal["yes", "no", "not shown", "not applicable", "not judged"]
NO_CONFIGURATION = "no configuration of it here"
NAME = "live-safety"
SCHEMA = "kv-harness-live-safety"

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

    mlx_lm_is_there()
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


def each(families: Sequence[str], programs: int, seed: int, jobs: int) -> Iterator[Row]:
    """``rows``, of ``jobs`` families at once, in the same order. A family whose process dies is not judged, and the
    others go on. KeyboardInterrupt after an interrupt."""
    from harness.progress import check
    from harness.workers import Died, in_processes

    if jobs == 1:
        yield from rows(families, programs, seed)
        return
    mlx_lm_is_there()
    calls = [(_rows_of, (family, programs, seed)) for family in families]
    ended: dict[int, list[Row]] = {}
    told = 0
    for number, made in in_processes(calls, jobs):
        check()
        died = isinstance(made, Died)
        ended[number] = [_not_judged(families[number], f"its process died ({made.how})")] if died else made
        while told in ended:
            yield from ended.pop(told)
            told += 1
    check()


def _rows_of(family: str, programs: int, seed: int) -> list[Row]:
    return list(rows([family], programs, seed))


def mlx_lm_is_there() -> str:
    """Its version. NotInstalled."""
    from harness.targets import mlx_lm

    return str(mlx_lm.version())


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
    from harness.progress import check
    from properties import BY_ID

    profile = dataclasses.replace(PROFILES["quick"], programs=programs, asked=True)
    properties = [BY_ID[name] for name in (*DECISIVE, *ALSO)]
    name = target.identity.full_name
    result = run_campaign(name, [target], properties, profile, seed, progress=lambda _: check())
    if result.partial:
        raise KeyboardInterrupt
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
    parser.add_argument("--out", type=folder, metavar="DIR", help=f"also write DIR/{NAME}.md and DIR/{NAME}.json")
    jobs_option(parser)


def act(arguments: argparse.Namespace) -> int:
    """Print the table, and how many rows have which answer; nothing is written of one that is interrupted. UsageError
    for a family that is not known, a folder that cannot be written to, and without mlx-lm."""
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
        if arguments.out is not None:
            arguments.out.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=arguments.out):  # found out now, not when all is done
                pass
        if not arguments.json:
            print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
        seen = []
        for row in each(chosen, arguments.programs, arguments.seed, arguments.jobs):
            seen.append(row)
            line = json.dumps(dataclasses.asdict(row)) if arguments.json else f"| {' | '.join(row.cells())} |"
            print(line, flush=True)
        if not arguments.json:
            print(f"\n{summary(seen)}")
        if arguments.out is not None:
            write(arguments.out, seen, arguments.programs, arguments.seed, whole=arguments.only is None)
    except NotInstalled as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        where = error.filename or arguments.out
        raise UsageError(f"cannot write reports: {where}: {error.strerror or error}") from error
    return 0


WHAT_NO_MEANS = (
    "`no`: a property of masks, positions or outputs is broken by the program that is shown. One without TrimFront "
    "says that the model is wrong, trimmed or not."
)


def write(out: Path, seen: Sequence[Row], programs: int, seed: int, *, whole: bool) -> None:
    """The table as Markdown, and as JSON with every field of the rows. ``whole``: no family was left out. OSError."""
    from harness.reporting import versions, write_atomically
    from harness.reporting.text import table
    from harness.targets.device import device

    told = {**versions(), "mlx-lm": mlx_lm_is_there()}
    asked = "" if whole else f" --only {','.join(dict.fromkeys(row.family for row in seen))}"
    command = f"kv-harness live-safety{asked} --programs {programs} --seed {seed}"
    record = {
        "schema": SCHEMA,
        "schema_version": 1,
        "command": command,
        "device": device(),
        "versions": told,
        "summary": summary(seen),
        "rows": [dataclasses.asdict(row) for row in seen],
    }
    write_atomically(out / f"{NAME}.json", json.dumps(record, indent=2) + "\n")
    lines = (
        "# Are models of mlx-lm right on caches whose front can be trimmed?",
        f"The model types of mlx-lm {told['mlx-lm']}, on our caches. {summary(seen)}.",
        WHAT_NO_MEANS,
        f"    {command}",
        f"mlx {told['mlx']}, {device()}.",
        table(COLUMNS, [row.cells() for row in seen]),
    )
    write_atomically(out / f"{NAME}.md", "\n\n".join(lines) + "\n")
