"""``pytest --kv-target mlx_lm:qwen3``: every configuration of a target is a test, and so is the planted bug.

Their names, ``kv-harness::mlx_lm:qwen3[tiny-rows]``, can be given back to pytest, with the option or without it.
Without either nothing is imported, collected or changed. Every process of ``pytest -n`` collects the same tests and
runs its part of them; each gets the programs that a run of the whole target would give it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROFILES = ("smoke", "quick", "ci", "nightly")
_ROOT = "kv-harness"  # what stands in the place of a file in the names of the tests
_TOLD = "kv_harness"  # the user property that carries verdicts from process to process, and into JUnit


_CHOSEN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The options; ``--kv-target`` is the one that does something."""
    group = parser.getgroup("kv-harness", "verify KV caches and attention masks (mlx-kv-harness)")
    group.addoption(
        "--kv-target",
        action="append",
        default=[],
        metavar="NAME,NAME",
        help="what to verify, as for `kv-harness run --target`; may be repeated",
    )
    group.addoption("--kv-profile", choices=PROFILES, default="quick", help="budget (default: quick)")
    group.addoption("--kv-seed", type=int, default=0, metavar="N", help="default: 0")
    group.addoption("--kv-out", default="reports", metavar="DIR", help="traces of findings go to DIR/findings")


def pytest_configure(config: pytest.Config) -> None:
    """The marker, and what must be set before MLX is imported."""
    config.addinivalue_line("markers", "kv_harness: a configuration that --kv-target names, verified by mlx-kv-harness")
    if config.getoption("--kv-target") or any(map(_is_ours, config.args)):
        os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # a compiled function hides its calls from the probe
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _is_ours(argument: str) -> bool:
    return argument.startswith(f"{_ROOT}::")


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Keep the names of our tests from pytest, which would look for files. The process that only hands tests out to
    others (``-n``) hands the names on, and collects nothing."""
    config = session.config
    if hasattr(config, "workerinput") or not config.pluginmanager.hasplugin("dsession"):
        config.stash[_CHOSEN] = [argument for argument in config.args if _is_ours(argument)]
        config.args[:] = [argument for argument in config.args if not _is_ours(argument)]


@pytest.hookimpl(tryfirst=True)  # before -k and -m choose
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add a test for every configuration of every target, or those of them that are named."""
    chosen = config.stash[_CHOSEN]
    if odd := [name for name in chosen if not re.fullmatch(rf"{_ROOT}::[^\[]+\[.+\]", name)]:
        raise pytest.UsageError(f"not found: {odd[0]} (a test is called {_ROOT}::TARGET[CONFIGURATION])")
    given: list[str] = config.getoption("--kv-target")
    given = given + [name.removeprefix(f"{_ROOT}::").rpartition("[")[0] for name in chosen]
    if not given:
        return
    from harness.targets.naming import split_names

    if not 0 <= config.getoption("--kv-seed") < 2**32:
        raise pytest.UsageError(f"--kv-seed: must lie in [0, 2**32), got {config.getoption('--kv-seed')}")
    names = dict.fromkeys(name for each in given for name in split_names(each))
    if not names or not all(map(str.strip, given)):
        raise pytest.UsageError("--kv-target: names no target")
    targets: Targets = Targets.from_parent(session, name=_ROOT, nodeid=_ROOT)
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
    run = Run("", "text", profile, seed, "live", Path(config.getoption("--kv-out")), target=name)
    try:
        subject = subject_of(run)
    except TargetError as error:
        raise pytest.UsageError(f"--kv-target {name}: {' '.join(str(error).split())}") from error
    config.add_cleanup(subject.close)
    shares = shares_of(subject.targets, profile)
    for target, share in zip(subject.targets, shares, strict=True):
        identity = target.identity
        yield Configuration.from_parent(
            targets,
            name=f"{name}[{identity.variant}-{identity.storage}]",
            verified=name,
            run=run,
            target=target,
            share=share,
        )
    others = [target.counterpart() for target in subject.targets]
    if all(other is not None for other in others):
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
    """One configuration, under every property."""

    def __init__(self, *, target: Any, share: int, **rest: Any) -> None:
        super().__init__(**rest)
        self._target, self._share = target, share

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
            self.name, [self._target], properties.ALL, profile, seed, progress=lambda _: check(), shares=[self._share]
        )
        if result.partial:
            raise KeyboardInterrupt
        result = with_known(result, known_of)
        verdicts = {row.id: row.verdict.value for row in result.properties}
        told = {"target": self.verified, "programs": result.tally.coverage.programs, "properties": verdicts}
        self.user_properties.append((_TOLD, json.dumps(told)))
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
            self.name,
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


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Properties by targets: the worst verdict of any configuration."""
    told: dict[str, dict[str, str]] = {}
    programs: dict[str, int] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for data in (json.loads(value) for key, value in report.user_properties if key == _TOLD):
                worst = told.setdefault(data["target"], {})
                programs[data["target"]] = programs.get(data["target"], 0) + data["programs"]
                for name, verdict in data["properties"].items():
                    worst[name] = min(worst.get(name, verdict), verdict, key=_ORDER.index)
    if not told:
        return
    from tabulate import tabulate

    names = list(dict.fromkeys(name for verdicts in told.values() for name in verdicts))
    rows = [[name, *(verdicts.get(name, "-") for verdicts in told.values())] for name in names]
    rows.append(["programs", *map(str, programs.values())])
    terminalreporter.section("kv-harness")
    terminalreporter.write_line(tabulate(rows, headers=["property", *told], tablefmt="simple"))


_ORDER = ("FAIL", "INCONCLUSIVE", "KNOWN", "VACUOUS", "PASS", "NOT APPLICABLE")
