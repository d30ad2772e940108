"""Processes of their own: results, errors, deaths and interrupts all come back, and nothing is left running."""

from __future__ import annotations

import contextlib
import multiprocessing
import operator
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import workers
from harness.terminal import Interrupts
from harness.workers import Died, in_a_process, in_processes, orphaned, processors

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _none_is_left() -> Iterator[None]:
    yield
    assert multiprocessing.active_children() == []


@pytest.fixture
def interrupts(monkeypatch: pytest.MonkeyPatch) -> Interrupts:
    """Those of this process, for one test; not installed: a test says what was requested."""
    monkeypatch.setattr(workers, "INTERRUPTS", Interrupts())
    return workers.INTERRUPTS


@pytest.mark.parametrize("jobs", [1, 2, 9])
def test_every_result_comes_back_with_its_number(jobs: int) -> None:
    calls: list[tuple[Any, tuple[Any, ...]]] = [(operator.mul, (number, 10)) for number in range(4)]
    assert sorted(in_processes(calls, jobs)) == [(0, 0), (1, 10), (2, 20), (3, 30)]


def test_each_call_has_a_process_of_its_own() -> None:
    made = dict(in_processes([(os.getpid, ()), (os.getpid, ()), (in_a_process, ())], 2))
    assert len({made[0], made[1], os.getpid()}) == 3 and made[2] is True
    assert not in_a_process() and not orphaned()


def test_several_run_at_once() -> None:
    started = time.monotonic()
    assert len(list(in_processes([(time.sleep, (3.0,))] * 3, 3))) == 3
    assert time.monotonic() - started < 9


def test_what_a_call_raises_is_raised_and_ends_the_others() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        list(in_processes([(time.sleep, (60,)), (int, ("x",))], 2))


@pytest.mark.parametrize(
    ("call", "how"),
    [
        ((os.abort, ()), "SIGABRT"),
        ((signal.raise_signal, (signal.SIGKILL,)), "SIGKILL"),
        ((os._exit, (7,)), "exit code 7"),
    ],
)
def test_a_death_is_told_and_the_others_go_on(call: tuple[Any, tuple[Any, ...]], how: str) -> None:
    assert sorted(in_processes([call, (operator.add, (1, 2))], 1)) == [(0, Died(how)), (1, 3)]


def test_an_interrupt_is_passed_on_once_and_nothing_more_begins(interrupts: Interrupts) -> None:
    calls: list[tuple[Any, tuple[Any, ...]]] = [(operator.add, (1, 2)), (time.sleep, (60,)), (time.sleep, (60,))]
    ended = in_processes(calls, 1)
    assert next(ended) == (0, 3)
    interrupts.requested = True
    assert list(ended) == []  # the second was not begun


def test_an_interrupted_call_raises_keyboard_interrupt_there(interrupts: Interrupts) -> None:
    ended = in_processes([(operator.add, (1, 2)), (time.sleep, (60,))], 2)
    assert next(ended) == (0, 3)
    time.sleep(1)  # the other one sleeps by now
    interrupts.requested = True
    with pytest.raises(KeyboardInterrupt):
        next(ended)


def test_who_stops_listening_leaves_nothing_running() -> None:
    ended = in_processes([(operator.add, (1, 2)), (time.sleep, (60,))], 2)
    assert next(ended) == (0, 3)
    ended.close()  # type: ignore[attr-defined]


def test_processors() -> None:
    assert 1 <= processors() <= (os.cpu_count() or 1)


def start(out: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "harness.cli", "run", "--families", "qwen2_vl", "--profile", "ci", "--jobs", "2"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [*command, "--out", str(out)], cwd=out, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip


def wait_for_programs(session: int) -> None:
    """Until both processes have used as much processor time as imports take, and some programs."""
    end = time.monotonic() + 300
    while time.monotonic() < end:
        time.sleep(0.5)
        fields = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields.append(stat.read_text().rpartition(")")[2].split())
        at_work = [one for one in fields if int(one[3]) == session and int(one[11]) > 7 * os.sysconf("SC_CLK_TCK")]
        if len(at_work) == 2:
            return
    raise AssertionError("two processes never got to work")


def wait_until_gone(group: int) -> None:
    """The last to go is a helper of multiprocessing."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.2)
    os.killpg(group, signal.SIGKILL)
    raise AssertionError("its processes went on")


linux = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc")


@linux
@pytest.mark.parametrize("group", [False, True], ids=["SIGTERM", "Ctrl-C on a terminal"])
def test_an_interrupted_run_keeps_what_its_processes_measured(group: bool, tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_programs(process.pid)
    if group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.terminate()
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 1, printed
    for name in ("qwen2_vl", "qwen2_vl+images"):
        assert f"interrupted in {name}; its report is marked partial" in printed
    assert sorted(path.name for path in (tmp_path / "families").glob("*.json")) == [
        "qwen2_vl-images.json",
        "qwen2_vl.json",
    ]
    assert "Traceback" not in printed
    wait_until_gone(process.pid)


@linux
def test_processes_do_not_outlive_a_run_that_was_killed(tmp_path: Path) -> None:
    process = start(tmp_path)
    wait_for_programs(process.pid)
    process.kill()
    process.wait()
    wait_until_gone(process.pid)
    process.communicate()
