"""Budgets. Every number of examples or steps lives here and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the command line reads the names of the profiles before anything heavy is imported
    from hypothesis import settings


@dataclass(frozen=True)
class Profile:
    """``programs``: examples per family; ``operations``: rules applied after the first prefill (some stand for two or
    four operations); ``remember``: keep an example database, so that what was once found is tried first (a fixed seed
    then no longer fixes the examples). ``shrink``: let Hypothesis shrink before ``harness.reduction`` does.  The
    reduction alone gets as far in a tenth of the time on the bugs we know; Hypothesis's own passes are for those that
    we do not.  ``least``: programs per configuration, however many there are.  ``of_a_kind``: per kind of caches,
    however few configurations have it.  ``patience``: further searches on a configuration on which some property has
    met no decisive step.  ``configurations``: how many are drawn per family, beside those that are built in.
    ``far``: for so many of its programs a configuration gets one more that is far from small
    (``harness.far_machine``); none if 0.
    ``every``: properties that run programs again do so with every how manieth (see ``harness.turns``).  ``asked``: the
    number of programs is not that of the profile of this name."""

    name: str
    programs: int
    operations: int
    remember: bool = False
    shrink: bool = True
    least: int = 8
    of_a_kind: int = 0
    patience: int = 5
    configurations: int = 0
    far: int = 0
    every: int = 4
    asked: bool = False

    def shares(self, kinds: Sequence[str]) -> tuple[int, ...]:
        """Programs on every configuration, before anything is found; ``kinds``: of their caches, one each."""
        alike = Counter(kinds)
        equal = max(self.least, -(-self.programs // max(1, len(kinds))))
        return tuple(max(equal, -(-self.of_a_kind // alike[kind])) for kind in kinds)

    def far_of(self, share: int) -> int:
        """Programs that are far from small on a configuration with this share of the others. One that has none of the
        others is there for those alone, and gets twice what a kind of caches gets. And one more, because Hypothesis
        begins with the simplest of all."""
        return 1 - (-(share or 2 * self.of_a_kind) // self.far) if self.far else 0

    def settings(self, database: Path | None = None) -> settings:
        """Hypothesis settings, every one of them set.

        With ``CI`` in the environment Hypothesis loads a profile of its own that derandomises; anything left unset
        here would inherit from it, and a nightly would repeat the same examples for ever.
        """
        from hypothesis import HealthCheck, Phase, Verbosity, settings
        from hypothesis.database import DirectoryBasedExampleDatabase

        from harness.provider import BACKEND

        phases = [Phase.generate]
        if self.shrink:
            phases.append(Phase.shrink)
        if self.remember:
            phases.insert(0, Phase.reuse)
        return settings(
            max_examples=self.programs,
            stateful_step_count=self.operations,
            derandomize=False,
            database=DirectoryBasedExampleDatabase(database) if self.remember and database else None,
            deadline=None,  # an example may build a model
            phases=phases,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            print_blob=False,
            verbosity=Verbosity.quiet,
            backend=BACKEND,
        )


PROFILES: dict[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile(
            "smoke", programs=24, operations=6, shrink=False, least=2, patience=0, configurations=1
        ),  # does it run at all?
        Profile("quick", programs=104, operations=6, shrink=False, least=6, of_a_kind=20, configurations=2, far=10),
        Profile("ci", programs=400, operations=8, of_a_kind=120, configurations=4, far=10),
        Profile("nightly", programs=5000, operations=12, of_a_kind=400, remember=True, configurations=12, far=10),
    )
}
