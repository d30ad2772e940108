"""However a worker ends, whatever it writes: an observation in an operation, an error before any; nothing is left."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import properties
from harness.campaign import run_campaign
from harness.capability import Capability
from harness.execution import execute
from harness.operations import Chunk, Decode, Prefill, Program, TrimFront
from harness.profiles import PROFILES
from harness.targets.naming import Asked, TargetError, resolve
from harness.targets.wire import WireTarget
from harness.wire import process

Misbehaving = Callable[[str, str], str]
Gone = Callable[[int], bool]
WIDE = Program((Prefill(4), TrimFront(2), Chunk(3), Decode(1)))
ENDS = {
    "abort": r"EngineDied: the engine was killed by SIGABRT; its stderr ends: .*last words of the engine",
    "segv": r"EngineDied: the engine was killed by SIGSEGV$",
    "kill": r"EngineDied: the engine was killed by SIGKILL \(from outside; out of memory\?\)$",
    "exit": r"EngineDied: the engine exited with code 3$",
    "hang": r"EngineHung: the engine gave no answer in 1\.5 s$",
    "endless": r"BadAnswer: the engine wrote 64 MiB without an end of the line, which begins b'x+'$",
    "garbage": r"BadAnswer: the engine's answer to 'forward': no line of JSON: b'Loading checkpoint shards: 100%'$",
    "half": r"EngineDied: the engine exited with code 0$",
    "two": r"BadAnswer: the engine wrote more than one line: b'{\"id\": 2}\\n' \(stdout is for answers alone\)$",
    "deep": r"BadAnswer: the engine's answer to 'forward': no line of JSON: b'\[+'$",
    "id": r"BadAnswer: the engine's answer to 'forward': it answers the request \d+, asked was \d+$",
}


def wire(command: str) -> WireTarget:
    """With as long for an answer as a busy machine may need, where none is waited for in vain."""
    limit = 1.5 if " hang " in command else 60.0
    (target,) = resolve(f"wire:{command}", Asked(limit=limit)).targets
    assert isinstance(target, WireTarget)
    return target


@pytest.mark.parametrize("mode", ENDS)
def test_in_an_operation_it_is_what_the_operation_raised(mode: str, misbehaving: Misbehaving, gone: Gone) -> None:
    target = wire(misbehaving(mode, "wide"))
    pid = target.engine.pid
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = execute(target, WIDE)
    assert [step.operation for step in run.steps] == list(WIDE.operations[:3])
    assert re.search(ENDS[mode], run.steps[-1].error or ""), run.steps[-1].error
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB: not the gigabyte
    assert pid is not None and gone(pid)
    assert execute(target, Program((Prefill(4), Chunk(3)))).steps[-1].error is None  # in a process of its own
    target.engine.stop()


def test_the_children_of_a_worker_end_with_it(misbehaving: Misbehaving, gone: Gone) -> None:
    error = execute(wire(misbehaving("child", "wide")), WIDE).steps[-1].error or ""
    child = re.search(r"child (\d+)", error)
    assert "SIGABRT" in error, error
    assert child is not None and gone(int(child[1]))


def test_a_log_on_stderr_is_no_answer_and_stops_nobody(misbehaving: Misbehaving) -> None:
    target = wire(misbehaving("flood", "forward"))
    assert execute(target, WIDE).steps[-1].error is None
    target.engine.stop()


def test_an_engine_that_dies_while_it_tells_of_its_caches(misbehaving: Misbehaving) -> None:
    run = execute(wire(misbehaving("segv", "tell")), WIDE)
    assert run.steps[-1].error == "EngineDied: the engine was killed by SIGSEGV" and len(run.steps) == 1
    assert run.steps[-1].forwards[0].seen.error is None  # the forward itself was answered
    assert Capability.LENGTHS in run.target.capabilities


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("version", "speaks version 2 of the protocol, this harness 1"),
        ("garbage", "no line of JSON"),
        ("abort", "killed by SIGABRT"),
        ("exit", "exited with code 3"),
        ("hang", "no answer in 7.5 s"),  # which a start may take
        ("endless", "64 MiB without an end"),
    ],
)
def test_before_any_operation_it_is_an_error(mode: str, said: str, misbehaving: Misbehaving) -> None:
    with pytest.raises(TargetError, match=re.escape(said)) as caught:
        wire(misbehaving(mode, "hello"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("/no/such/worker --at all", "'/no/such/worker' cannot be started: No such file or directory"),
        ("'half a quote", "cannot be read: No closing quotation"),
        ("/", "'/' cannot be started: Permission denied"),
        ("a\0b", "cannot be started: embedded null byte"),
        ("false", "the engine exited with code 1"),
        ("sh -c 'exit 134'", "exited with code 134 (a shell's word for SIGABRT)"),
    ],
)
def test_a_command_that_starts_no_worker(command: str, said: str) -> None:
    with pytest.raises(TargetError, match=re.escape(said)):
        wire(command)


def test_nothing_is_left_when_the_target_is_forgotten(toy: str, gone: Gone) -> None:
    target = wire(toy)
    pid = target.engine.pid
    assert pid is not None and not gone(pid)
    del target
    assert gone(pid)


def test_an_interrupt_ends_the_worker(monkeypatch: pytest.MonkeyPatch, toy: str, gone: Gone) -> None:
    """What it answers later would be taken for the answer to another question."""
    target = wire(toy)
    pid = target.engine.pid

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(process.WorkerProcess, "_take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        execute(target, WIDE)
    assert pid is not None and gone(pid) and target.engine.pid is None
    monkeypatch.undo()


@pytest.mark.parametrize("mode", ["abort", "segv"])
def test_the_historic_crash_is_found_and_shrunk_by_an_ordinary_campaign(mode: str, misbehaving: Misbehaving) -> None:
    target = wire(misbehaving(mode, "wide"))
    result = run_campaign("wire", [target], properties.ALL, PROFILES["quick"], 0, first_only=True)
    (bug,) = result.found
    assert bug.finding.property_id == "every_operation_completes" and bug.reproducible
    assert len(bug.finding.program.operations) <= 4, str(bug.finding.program)
    assert f"was killed by SIG{mode.upper()}" in bug.finding.message.replace("SIGABRT", "SIGABORT")
    target.engine.stop()


def test_a_harness_that_is_killed_leaves_nothing(misbehaving: Misbehaving, gone: Gone, temporary: Path) -> None:
    """In the middle of a hang, so that no end of its input can tell the worker."""
    program = (
        "import sys; from harness.targets.naming import Asked, resolve; "
        "(target,) = resolve('wire:' + sys.argv[1], Asked()).targets; "
        "print(target.engine.pid, flush=True); target.open(('pool',)).forward(0, (1, 2))"
    )
    command = [sys.executable, "-c", program, misbehaving("hang", "forward")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        pid = int(harness.stdout.readline())
        time.sleep(0.3)
        assert any(temporary.iterdir()) and not gone(pid)
        harness.kill()
    assert gone(pid)
    for _ in range(100):
        if not any(temporary.iterdir()):
            break
        time.sleep(0.02)
    assert list(temporary.iterdir()) == []


def test_what_nobody_was_left_to_remove_the_next_harness_removes(toy: str, gone: Gone, temporary: Path) -> None:
    """The harness and its guard are killed, as by a container that ends or a lack of memory."""
    program = (
        "import sys, os; from harness.targets.naming import Asked, resolve; "
        "(target,) = resolve('wire:' + sys.argv[1], Asked()).targets; worker = target.engine._worker; "
        "print(worker.pid, worker._guard.pid, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, toy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as harness:
        assert harness.stdout is not None
        pid, guard = map(int, harness.stdout.readline().split())
        os.kill(guard, signal.SIGKILL)
        assert gone(guard)
        harness.kill()
    (leaked,) = temporary.iterdir()
    assert gone(pid)  # its input has ended
    target = wire(toy)
    assert not leaked.exists() and len(list(temporary.iterdir())) == 1  # of the new worker
    target.engine.stop()


def test_a_worker_that_starts_slowly_is_asked_again_all_the_same(tmp_path: Path) -> None:
    """What was found by one that had started in time came back from none: the start alone exceeded the limit."""
    command = f"{sys.executable} {Path(__file__).parent / 'sometimes.py'} {tmp_path / 'once'} slow"
    (target,) = resolve(f"wire:{command}", Asked(limit=1.5)).targets
    result = run_campaign("wire", [target], properties.ALL, PROFILES["smoke"], 0, first_only=True)
    (bug,) = result.found
    assert (bug.finding.property_id, bug.reproducible) == ("positions_are_absolute", True)
    target.renew()
