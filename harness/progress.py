"""How far a run is, for whoever waits; and whether somebody wants it to stop."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from harness.terminal import INTERRUPTS
from harness.workers import in_a_process, orphaned

SILENCE = 30.0  # seconds after which a run without a terminal says how far it is


def check() -> None:
    """KeyboardInterrupt when somebody asked for it, or nobody waits for this process any more."""
    INTERRUPTS.check()
    if orphaned():
        raise KeyboardInterrupt


@contextmanager
def progress(name: str, programs: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr where that is a terminal, else a line every half minute. Findings lead to further programs, so
    the total may grow."""
    if not sys.stderr.isatty() or in_a_process():  # several bars would write over each other
        said = time.monotonic()

        def say(done: int) -> None:
            nonlocal said
            check()
            if time.monotonic() - said >= SILENCE:
                said = time.monotonic()
                print(f"{name}: {done} of {max(programs, done)} programs", file=sys.stderr, flush=True)

        yield say
        return
    columns = (TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name, total=programs)

        def advance(done: int) -> None:
            check()
            bar.update(task, completed=done, total=max(programs, done))

        yield advance
