"""The tests that ``pytest --kv-target`` adds: one for every configuration of a target, and one for the planted bug.

The plugin is ``mlx_kv_harness_plugin``, whose source is in ``harness/shim``; an install loads it by itself. Where this
package is on PYTHONPATH alone, ``-p harness.pytest_plugin`` does.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = "kv-harness"  # what stands in the place of a file in the names of the tests; the plugin has both words too
TOLD = "kv_harness"  # the user property that carries verdicts from process to process, and into JUnit
_ENTRY = "kv_harness"  # the name of the entry point: pytest loads nothing twice under one name
_PLUGIN = "mlx_kv_harness_plugin"


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    """Whoever names this module as a plugin means that one."""
    loaded = pluginmanager.get_plugin(_ENTRY)
    if loaded is None or loaded is sys.modules[__name__]:
        name = _PLUGIN if importlib.util.find_spec(_PLUGIN) else f"harness.shim.{_PLUGIN}"
        pluginmanager.register(importlib.import_module(name), _PLUGIN if loaded else _ENTRY)


def add_tests(session: pytest.Session, items: list[pytest.Item], given: list[str], chosen: list[str]) -> None:
    """Append the tests of the targets ``given`` (values of ``--kv-target``) and those ``chosen`` by their names.

    Raises:
        pytest.UsageError: one of them does not exist.
    """
    config = session.config
    if odd := [name for name in chosen if not re.fullmatch(rf"{ROOT}::[^\[]+\[.+\]", name)]:
        raise pytest.UsageError(f"not found: {odd[0]} (a test is called {ROOT}::TARGET[CONFIGURATION])")
    given = given + [name.removeprefix(f"{ROOT}::").rpartition("[")[0] for name in chosen]
    from harness.targets.naming import MOST, split_names

    if not 0 <= config.getoption("--kv-seed") < 2**32:
        raise pytest.UsageError(f"--kv-seed: must lie in [0, 2**32), got {config.getoption('--kv-seed')}")
    if not 0 < config.getoption("--kv-limit") <= MOST:
        raise pytest.UsageError(f"--kv-limit: must lie in (0, {MOST:g}] seconds, got {config.getoption('--kv-limit')}")
    names = dict.fromkeys(name for each in given for name in split_names(each))
    if not names or not all(map(str.strip, given)):
        raise pytest.UsageError("--kv-target: names no target")
    targets: Targets = Targets.from_parent(session, name=ROOT, nodeid=ROOT)
    targets.tests = [test for name in names for test in _items(targets, config, name)]
    if chosen:
        known = {test.nodeid for test in targets.tests}
        if unknown := [name for name in chosen if name not in known]:
            raise pytest.UsageError(f"not found: {unknown[0]} (there are {', '.join(sorted(known))})")
        targets.tests = [test for test in targets.tests if test.nodeid in chosen]
    # As for any other collector: whoever counts or lists what is collected hears of it.
    session.ihook.pytest_collectstart(collector=targets)
    report = session.ihook.pytest_make_collect_report(collector=targets)
    session.ihook.pytest_collectreport(report=report)
    items.extend(targets.tests)


class Targets(pytest.Collector):
    """All tests of targets, in the place of a file."""

    tests: list[pytest.Item]

    def collect(self) -> list[pytest.Item]:
        return self.tests


def _items(targets: Targets, config: pytest.Config, name: str) -> Iterator[pytest.Item]:
    from harness.campaign import shares_of
    from harness.profiles import PROFILES as BUDGETS
    from harness.runner import Run, subject_of
    from harness.targets.naming import TargetError

    profile, seed = BUDGETS[config.getoption("--kv-profile")], config.getoption("--kv-seed")
    policy, limit = config.getoption("--kv-policy"), config.getoption("--kv-limit")
    run = Run("", "text", profile, seed, policy, Path(config.getoption("--kv-out")), target=name, limit=limit)
    try:
        subject = subject_of(run)
    except TargetError as error:
        raise pytest.UsageError(f"--kv-target {name}: {' '.join(str(error).split())}") from error
    config.add_cleanup(subject.close)
    shares = shares_of(subject.targets, profile)
    run = replace(run, family=subject.family, path=subject.path, stem=subject.file_name)
    others = [target.counterpart() for target in subject.targets]
    controlled = policy == "live" and all(other is not None for other in others)
    control = "a test" if controlled else "none" if policy == "live" else "judged itself"
    for number, (target, share) in enumerate(zip(subject.targets, shares, strict=True)):
        identity = target.identity
        yield Configuration.from_parent(
            targets,
            name=f"{name}[{identity.variant}-{identity.storage}]",
            verified=name,
            run=run,
            target=target,
            share=share,
            number=number,
            control=control,
        )
    if controlled:
        yield Control.from_parent(targets, name=f"{name}[planted bug]", verified=name, run=run, targets=others)


class Verified(pytest.Item):
    """A test of a target. ``verified``: the target's name; ``run``: what decides programs."""

    def __init__(self, *, verified: str, run: Any, **rest: Any) -> None:
        super().__init__(**rest)
        self.verified, self.run = verified, run
        self.add_marker("kv_harness")

    def reportinfo(self) -> tuple[str, None, str]:
        return str(self.path), None, f"kv-harness {self.name}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """What was found is the whole message: where in the harness it was raised helps nobody."""
        return str(excinfo.value) if isinstance(excinfo.value, Broken) else super().repr_failure(excinfo, style)


class Broken(AssertionError):
    """A property does not hold, or nothing was proved of it."""


class Configuration(Verified):
    """One configuration, under every property, with the programs that ``kv-harness run`` draws for it. ``number``: its
    place among the configurations of the target; ``control``: what becomes of the planted bug."""

    def __init__(self, *, target: Any, share: int, number: int, control: str, **rest: Any) -> None:
        super().__init__(**rest)
        self._target, self._share, self._number, self._control = target, share, number, control

    def runtest(self) -> None:
        import properties
        from harness.campaign import run_campaign
        from harness.findings import Verdict
        from harness.known import known_of
        from harness.progress import check
        from harness.reporting.verdicts import with_known
        from harness.runner import write_findings

        profile, seed = self.run.profile, self.run.seed
        result = run_campaign(
            str(self.run.stem),
            [self._target],
            properties.ALL,
            profile,
            seed,
            progress=lambda _: check(),
            shares=[self._share],
            numbers=[self._number],
        )
        if result.partial:
            raise KeyboardInterrupt
        if not result.tally.coverage.programs:
            raise Broken(f"no program was drawn: {profile.name} has none that are far from small, see kv-harness run")
        result = with_known(result, known_of)
        verdicts = {row.id: row.verdict.value for row in result.properties}
        told = {"target": self.verified, "programs": result.tally.coverage.programs, "properties": verdicts}
        told["control"] = self._control
        self.user_properties.append((TOLD, json.dumps(told)))
        replays = write_findings(self.run, result)
        bad = [self._failure(bug, replays[bug.finding.property_id]) for bug in result.found]
        tolerated = {Verdict.PASS, Verdict.NOT_APPLICABLE, Verdict.FAIL, Verdict.KNOWN}  # told by their findings
        if profile.name == "smoke":  # too small to be strict
            tolerated.add(Verdict.VACUOUS)
        bad += [
            f"{row.verdict.value}  {row.id}: {row.reason}" for row in result.properties if row.verdict not in tolerated
        ]
        if bad:
            raise Broken("\n".join(bad))

    @staticmethod
    def _failure(bug: Any, replay: str) -> str:
        from harness.known import known_line, known_of

        text = f"{bug.finding.text()}\n      replay    {replay}"
        known = known_of(bug)
        return text if known is None else f"KNOWN{text.removeprefix('FAIL')}\n      known     {known_line(known)}"


class Control(Verified):
    """The planted bug: without it the other tests of a target would prove less than they seem to."""

    def __init__(self, *, targets: list[Any], **rest: Any) -> None:
        super().__init__(**rest)
        self._targets = targets

    def runtest(self) -> None:
        import properties
        from harness.campaign import run_campaign
        from harness.progress import check
        from harness.runner import CONTROL

        judges: Any = [properties.BY_ID[name] for name in CONTROL]
        found = run_campaign(
            f"{self.run.stem}_control",
            self._targets,
            judges,
            self.run.profile,
            self.run.seed,
            progress=lambda _: check(),
            first_only=True,
        )
        if not any(bug.reproducible for bug in found.found):
            programs = found.tally.coverage.programs
            raise Broken(f"the planted bug was not caught in {programs} programs, so the run proves nothing")
