"""``pytest --kv-target mlx_lm:qwen3``: every configuration of a target is a test, and so is the planted bug.

Their names, ``kv-harness::mlx_lm:qwen3[tiny-rows]``, can be given back to pytest, with the option or without it.
Without either nothing is imported, collected or changed. Every process of ``pytest -n`` collects the same tests and
runs its part of them; each gets the programs that a run of the whole target would give it.

pytest loads this module wherever the package is installed, also in repositories that have a folder ``harness``,
``properties`` or ``reference_models`` of their own. So it is installed under its own name, imports nothing of ours
before the options ask for it, and looks first whether those names still mean ours.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

PROFILES = ("smoke", "quick", "ci", "nightly")
ROOT = "kv-harness"  # what stands in the place of a file in the names of the tests
TOLD = "kv_harness"  # the user property that carries verdicts from process to process, and into JUnit
PACKAGES = {"harness": "pytest_plugin.py", "properties": "__init__.py", "reference_models": "registry.py"}

_CHOSEN = pytest.StashKey[list[str]]()
_ORDER = ("FAIL", "INCONCLUSIVE", "KNOWN", "VACUOUS", "PASS", "NOT APPLICABLE")


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
    group.addoption("--kv-policy", choices=("live", "offset"), default="live", help="as `kv-harness run --policy`")
    group.addoption("--kv-limit", type=float, default=60.0, metavar="SECONDS", help="as `kv-harness run --limit`")
    group.addoption("--kv-out", default="reports", metavar="DIR", help="traces of findings go to DIR/findings")


def pytest_configure(config: pytest.Config) -> None:
    """The marker, and what must be set before MLX is imported. A folder in the way is told before anything runs."""
    config.addinivalue_line("markers", "kv_harness: a configuration that --kv-target names, verified by mlx-kv-harness")
    if config.getoption("--kv-target") or any(map(_is_ours, config.args)):
        refuse_what_is_in_the_way()
        os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # a compiled function hides its calls from the probe
        os.environ.setdefault("MLX_ENABLE_TF32", "0")
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def _is_ours(argument: str) -> bool:
    return argument.startswith(f"{ROOT}::")


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
    given: list[str] = config.getoption("--kv-target")
    if not given and not chosen:
        return
    refuse_what_is_in_the_way()  # again: test modules may have put folders in front of sys.path, or imported theirs
    for name in PACKAGES:  # all of them now: later tests may change sys.path once more
        importlib.import_module(name)
    from harness.pytest_plugin import add_tests

    add_tests(session, items, given, chosen)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Properties by targets: the worst verdict of any configuration."""
    told: dict[str, dict[str, str]] = {}
    programs: dict[str, int] = {}
    control: dict[str, str] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for data in (json.loads(value) for key, value in report.user_properties if key == TOLD):
                worst = told.setdefault(data["target"], {})
                programs[data["target"]] = programs.get(data["target"], 0) + data["programs"]
                control[data["target"]] = data["control"]
                for name, verdict in data["properties"].items():
                    worst[name] = min(worst.get(name, verdict), verdict, key=_ORDER.index)
    if not told:
        return
    from tabulate import tabulate

    names = list(dict.fromkeys(name for verdicts in told.values() for name in verdicts))
    rows = [[name, *(verdicts.get(name, "-") for verdicts in told.values())] for name in names]
    rows.append(["programs", *map(str, programs.values())])
    rows.append(["planted bug", *(control[name] for name in told)])
    terminalreporter.section("kv-harness")
    terminalreporter.write_line(tabulate(rows, headers=["property", *told], tablefmt="simple"))
    for name in told:
        if control[name] == "none":
            terminalreporter.write_line(f"{name}: no bug is planted, so nothing shows what would have been found")


def refuse_what_is_in_the_way() -> None:
    """Imports nothing.

    Raises:
        pytest.UsageError: ``harness``, ``properties`` or ``reference_models`` means somebody else's folder, or none.
    """
    places = {name: _place_of(name) for name in PACKAGES}
    # Another checkout may come before the install (PYTHONPATH): ours is what `harness` means, if it looks like ours.
    harness = places["harness"]
    home = harness.parent if harness is not None and _looks_like_ours("harness", harness) else None
    for name, place in places.items():
        if place is None:
            raise pytest.UsageError(f"--kv-target: the package {name!r} of mlx-kv-harness is not on sys.path")
        if not _looks_like_ours(name, place) or (home is not None and place.parent != home):
            raise pytest.UsageError(
                f"--kv-target: {place} is in the way of the package {name!r} of mlx-kv-harness: run pytest from "
                "another folder, or keep that one off sys.path (`python -P -m pytest --import-mode=importlib`); "
                "`-p no:kv_harness` leaves this plugin out"
            )


def _place_of(name: str) -> Path | None:
    """The folder (or file) that an import of ``name`` gives, or gave; None if there is none."""
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module without a spec, made by hand
        return Path(getattr(sys.modules[name], "__file__", None) or f"a module {name!r} without a file")
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0] if folders else spec.origin or f"a module {name!r} without a file").absolute()


def _looks_like_ours(name: str, place: Path) -> bool:
    return (place / PACKAGES[name]).is_file()
