"""What lies between a run and the outside: signals that stop it, and a standard output that may go away."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_hook = sys.unraisablehook


def _without_interrupts(dropped: sys.UnraisableHookArgs) -> None:
    """An interrupt that Python dropped is remembered, and nothing to tell anybody of."""
    if not issubclass(dropped.exc_type, KeyboardInterrupt):
        _hook(dropped)


class Interrupts:
    """SIGINT and SIGTERM as KeyboardInterrupt, remembered.

    An interrupt that is raised in the wrong place is lost (Python drops what a garbage collector callback raises), so
    a run asks ``check()`` at its own good places as well.  While ``deferred()``, an interrupt only takes note.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def install(self) -> None:
        """Take over both signals; does nothing outside the main thread, where that is not allowed."""
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                signal.signal(number, self._take)
            except ValueError:
                return

        if sys.unraisablehook is not _without_interrupts:
            global _hook
            _hook, sys.unraisablehook = sys.unraisablehook, _without_interrupts

    def check(self) -> None:
        """Raise KeyboardInterrupt if one was requested."""
        if self.requested and not self._deferred:
            raise KeyboardInterrupt

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block finish first: a report is written whole or not at all. Blocks may lie in each other."""
        before, self._deferred = self._deferred, True
        try:
            yield
        finally:
            self._deferred = before

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        if not self._deferred:
            raise KeyboardInterrupt


INTERRUPTS = Interrupts()


class Output(io.TextIOBase):
    """Standard output that survives its reader: after the first error nothing more is written, and nothing is raised.

    A run whose reader has gone (``| head``) still writes its reports and keeps its exit code.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stream = sys.stdout
        self.error: OSError | None = None
        if isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal cannot show

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        if self._stream is not None and self.error is None:
            try:
                self._stream.write(text)
            except OSError as error:
                self._fail(error)
        return len(text)

    def flush(self) -> None:
        if self._stream is not None and self.error is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> None:
        self.error = error
        # What is still buffered would fail again when the interpreter closes the stream.
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
