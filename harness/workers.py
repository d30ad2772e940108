"""Calls in processes of their own, several at once; what kills the process of one kills nothing else.

MLX and Hypothesis hold state per process, so threads would not do. A process is made for every call, which costs about
a second: a call should be worth that.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from harness.terminal import INTERRUPTS

_STOPPING = {signal.SIGINT, signal.SIGTERM}
LOOK = 0.5  # seconds between two looks at whether somebody wants to stop


@dataclass(frozen=True)
class Died:
    """The process of a call ended without a result. ``how``: killed by which signal, or its exit code."""

    how: str


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_a_process() -> bool:
    """Is this a process of ``in_processes``?"""
    return multiprocessing.parent_process() is not None


def orphaned() -> bool:
    """In a process of ``in_processes``: has the one that waits for it gone? A long call should then stop."""
    parent = multiprocessing.parent_process()
    return parent is not None and not parent.is_alive()


def in_processes(calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]], jobs: int) -> Iterator[tuple[int, Any]]:
    """Yield (number of the call, its result or Died) as they end; at most ``jobs`` run at once.

    Functions, arguments and results must be picklable. What a call raises is raised here, and ends the others. After an
    interrupt no call is begun and those that run are interrupted once; what they still return is yielded.
    """
    context = multiprocessing.get_context("spawn")
    left = list(enumerate(calls))[::-1]
    running: dict[Connection, tuple[int, SpawnProcess]] = {}
    told = False
    with INTERRUPTS.deferred():
        try:
            while running or (left and not INTERRUPTS.requested):
                while left and len(running) < jobs and not INTERRUPTS.requested:
                    number, (function, arguments) = left.pop()
                    ours, theirs = context.Pipe(duplex=False)
                    process = context.Process(target=_call, args=(theirs, function, arguments), daemon=True)
                    with _held_back():
                        process.start()
                    theirs.close()  # so that the end of the process ends the pipe
                    running[ours] = number, process
                if INTERRUPTS.requested and not told:
                    told = True
                    for _, process in running.values():
                        process.terminate()
                for pipe in wait(list(running), timeout=LOOK):
                    assert isinstance(pipe, Connection)
                    number, process = running.pop(pipe)
                    yield number, _result(pipe, process)
        finally:
            for _, process in running.values():
                process.kill()
                process.join()


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
    """A process that is begun here hears of no interrupt before ``_call`` listens: imports come first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _result(pipe: Connection, process: SpawnProcess) -> Any:
    try:
        done, result = pipe.recv()
    except EOFError:
        process.join()
        code = process.exitcode
        return Died(f"exit code {code}" if code is None or code >= 0 else signal.Signals(-code).name)
    process.join()
    if not done:
        raise result
    return result


def _call(pipe: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """In the new process. SIGINT goes to everybody on a terminal: whoever waits passes it on, once, as SIGTERM."""
    INTERRUPTS.install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
        outcome = True, function(*arguments)
    except BaseException as error:
        outcome = False, error
    with INTERRUPTS.deferred(), contextlib.suppress(BrokenPipeError):  # nobody waits for it any more
        pipe.send(outcome)
