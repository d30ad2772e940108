"""Signals that stop a run, wherever they arrive, and a standard output that goes away."""

from __future__ import annotations

import errno
import gc
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kv_harness_fake_target import FakeTarget

import properties
from harness import terminal
from harness.campaign import run_campaign
from harness.profiles import Profile
from harness.terminal import Interrupts, Output

ROOT = Path(__file__).parents[2]
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


@pytest.fixture
def interrupts() -> Iterator[Interrupts]:
    """Installed for one test."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    made = Interrupts()
    made.install()
    yield made
    for number, handler in before.items():
        signal.signal(number, handler)


@SIGNALS
def test_an_interrupt_is_raised_and_remembered(number: signal.Signals, interrupts: Interrupts) -> None:
    interrupts.check()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    assert interrupts.requested
    for _ in range(2):  # it stays
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()


@SIGNALS
def test_a_deferred_interrupt_only_takes_note(number: signal.Signals, interrupts: Interrupts) -> None:
    done = False
    with interrupts.deferred():
        signal.raise_signal(number)
        interrupts.check()
        done = True
    assert done and interrupts.requested
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


def test_what_is_deferred_is_deferred_no_longer_than_its_block(interrupts: Interrupts) -> None:
    with pytest.raises(OSError, match="disk"), interrupts.deferred():
        raise OSError("disk")
    interrupts.check()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_nothing_is_taken_over() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            Interrupts().install()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == [] and [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


class Swallower:
    """Lets a signal arrive while a callback of the garbage collector runs: what it raises there, Python drops."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dropped: list[Any] = []
        monkeypatch.setattr(sys, "unraisablehook", lambda dropped: self.dropped.append(dropped.exc_type))

    def __call__(self, number: signal.Signals) -> None:
        def callback(phase: str, info: dict[str, int]) -> None:
            if phase == "start":
                gc.callbacks.remove(callback)
                signal.raise_signal(number)

        gc.callbacks.append(callback)
        gc.collect()


@SIGNALS
def test_an_interrupt_that_python_drops_is_not_lost(
    number: signal.Signals, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    swallow = Swallower(monkeypatch)
    swallow(number)  # raises nothing here
    assert swallow.dropped == [KeyboardInterrupt] and interrupts.requested
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()


def test_an_interrupt_that_python_drops_is_not_told_as_an_error(
    interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(terminal, "_hook", lambda dropped: told.append(dropped.exc_type))
    monkeypatch.setattr(sys, "unraisablehook", terminal._without_interrupts)
    for error in (KeyboardInterrupt, ValueError):

        def callback(phase: str, info: dict[str, int], error: type[BaseException] = error) -> None:
            gc.callbacks.remove(callback)
            raise error

        gc.callbacks.append(callback)
        gc.collect()
    assert told == [ValueError]


@SIGNALS
def test_a_run_whose_interrupt_python_dropped_stops_all_the_same(
    number: signal.Signals, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch
) -> None:
    swallow = Swallower(monkeypatch)
    forwards = 0

    def hook() -> None:
        nonlocal forwards
        forwards += 1
        if forwards == 30:
            swallow(number)

    profile = Profile("p", programs=200, operations=6, shrink=False)
    targets = [FakeTarget(hook=hook)]
    result = run_campaign("fake", targets, properties.ALL, profile, 0, progress=lambda _: interrupts.check())
    assert swallow.dropped == [KeyboardInterrupt]
    assert result.partial and 0 < result.tally.coverage.programs < 30


class Broken(io.RawIOBase):
    """A stream that takes ``room`` bytes and then fails."""

    def __init__(self, number: int, room: int = 0) -> None:
        super().__init__()
        self.number, self.room, self.tries = number, room, 0
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.tries += 1
        if len(self.taken) + len(data) > self.room:
            raise OSError(self.number, os.strerror(self.number))
        self.taken += data
        return len(data)


def stream(raw: io.RawIOBase, encoding: str = "utf-8", through: bool = True) -> io.TextIOWrapper:
    buffer = io.BufferedWriter(raw)
    return io.TextIOWrapper(buffer, encoding=encoding, write_through=through, line_buffering=through)


@pytest.fixture
def redirected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """File descriptors that were turned into /dev/null; in a test that would be pytest's own."""
    turned: list[int] = []
    fake = SimpleNamespace(devnull=os.devnull, dup2=lambda _, number: turned.append(number))
    monkeypatch.setattr(terminal, "os", fake)
    return turned


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("through", [True, False], ids=["in write", "in flush"])
def test_after_the_first_error_nothing_is_raised_and_nothing_written(
    number: int, through: bool, monkeypatch: pytest.MonkeyPatch, redirected: list[int]
) -> None:
    raw = Broken(number, room=6)
    held = stream(raw, through=through)
    monkeypatch.setattr(sys, "stdout", held)
    output = Output()
    assert output.writable() and output.error is None
    assert output.write("first\n") == 6
    output.flush()
    assert output.error is None and raw.taken == b"first\n" and redirected == []
    assert output.write("second\n") == 7
    output.flush()
    assert output.error is not None and output.error.errno == number and redirected == [1]
    assert isinstance(output.error, BrokenPipeError) == (number == errno.EPIPE)
    error, tries = output.error, raw.tries
    for _ in range(3):
        assert output.write("third\n") == 6
        output.flush()
    assert output.error is error and raw.tries == tries and raw.taken == b"first\n" and redirected == [1]
    raw.room = 10**6  # or closing it at the end would fail once more
    held.detach()


def test_what_the_terminal_cannot_show_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Broken(errno.EIO, room=1000)
    monkeypatch.setattr(sys, "stdout", stream(raw, "ascii"))
    output = Output()
    print("caf\xe9 \udcff \u2713", file=output, flush=True)
    assert raw.taken == b"caf\\xe9 \\udcff \\u2713\n" and output.error is None


def test_without_a_standard_output_there_is_nothing_to_write_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    output = Output()
    assert output.write("text") == 4 and output.error is None
    output.flush()


SCRIPT = """
import sys
from harness.terminal import Output
output = Output()
for number in range(20000):
    print("line", number, file=output)
output.flush()
error = output.error
print("none" if error is None else f"{type(error).__name__} {error.errno}", file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("| head -1", f"BrokenPipeError {errno.EPIPE}"),
        ("> /dev/full", f"OSError {errno.ENOSPC}"),
        ("> /dev/null", "none"),
        (">&-", "none"),
    ],
)
def test_a_process_keeps_its_exit_code_whatever_becomes_of_its_output(where: str, told: str) -> None:
    """Nor does the interpreter complain when it closes what could not be written."""
    line = f'"$1" -c "$2" {where}'
    command = ["bash", "-o", "pipefail", "-c", line, "bash", sys.executable, SCRIPT]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stderr) == (7, f"{told}\n")
    assert done.stdout == ("line 0\n" if "head" in where else "")
