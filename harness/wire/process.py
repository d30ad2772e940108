"""The process of a worker: started, asked line by line within a limit, ended with all that it started.

What it writes is read as it comes and never kept beyond ``MAX_LINE``; of its stderr the end is kept, for the reader of
a finding.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import signal
import subprocess
import time
import weakref

from harness import scratch

MAX_LINE = 64 << 20  # bytes of an answer; the largest that the harness asks for has a tenth of it
TAIL = 2000  # bytes of stderr that are kept
START = 5  # limits for the first answer: a start imports a library, may read weights, and comes where a machine is busy
GRACE = 2.0  # seconds in which a process that closes its output, or is asked to end, has to do so
LOOK = 0.5  # seconds of silence after which it is looked up whether the process still runs
FOLDER = f"{scratch.PREFIX}wire-"


class WorkerError(Exception):
    """A worker did not answer as it must; it has been ended. The message is one line."""


class EngineDied(WorkerError):
    """Its process ended."""


class EngineHung(WorkerError):
    """It gave no answer in time."""


class BadAnswer(WorkerError):
    """It wrote something that is no answer."""


class CannotStart(WorkerError):
    """There is no such command."""


_GUARD = 'read -r _; kill -KILL "-$1"; rm -rf -- "$2"'
"""What a shell does once its input ends, with the number of a group and a folder: SIGKILL leaves us no time for it.
Where it is killed as well, the folder is left to who comes next (``harness.scratch``)."""


def _guard(pid: int, folder: str) -> subprocess.Popen[bytes] | None:
    """Who ends the worker where this process is killed; None where there is no shell. Its input is a pipe of ours."""
    command = ["/bin/sh", "-c", _GUARD, "kv-harness-guard", str(pid), folder]
    nobody = subprocess.DEVNULL
    try:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nobody, stderr=nobody, start_new_session=True)
    except OSError:
        return None


def _end(
    process: subprocess.Popen[bytes], guard: subprocess.Popen[bytes] | None, folder: scratch.Folder, grace: float
) -> None:
    """End the process and its group, and remove the folder of its temporary files."""
    if guard is not None:  # before the number of the process can be that of another
        guard.kill()
        guard.wait()
        if guard.stdin is not None:
            guard.stdin.close()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    if grace:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a group of zombies
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    folder.remove()


class WorkerProcess:
    """A worker that runs. It is ended by ``stop``, by any WorkerError, with the object, and with this process."""

    def __init__(self, command: str, limit: float) -> None:
        """``command``: split as a shell would, but run without one; ``limit``: seconds for one answer, of which the
        first has START times as many. Raises CannotStart."""
        try:
            arguments = shlex.split(command)
        except ValueError as error:
            raise CannotStart(f"the command {command!r:.200} cannot be read: {error}") from error
        if not arguments:
            raise CannotStart("the command is empty")
        self._limit, self._next = limit, START * limit
        try:
            folder = scratch.make(FOLDER)  # what a killed worker leaves there goes with it
        except OSError as error:
            raise CannotStart(f"no folder can be made for its temporary files: {error.strerror or error}") from error
        try:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a group of its own, to be ended as one; Ctrl-C is for the harness
                env={**os.environ, "TMPDIR": str(folder.path)},
            )
        except (OSError, ValueError) as error:
            folder.remove()
            why = error.strerror if isinstance(error, OSError) else error
            raise CannotStart(f"{arguments[0]!r:.200} cannot be started: {why}") from error
        except BaseException:
            folder.remove()
            raise
        self._guard = _guard(self._process.pid, str(folder.path))
        self._stop = weakref.finalize(self, _end, self._process, self._guard, folder, 0.0)
        self._folder = folder
        pipes = (self._process.stdin, self._process.stdout, self._process.stderr)
        self._in, self._out, self._err = (pipe.fileno() for pipe in pipes if pipe is not None)
        self._selector = selectors.DefaultSelector()
        for fd in (self._in, self._out, self._err):
            os.set_blocking(fd, False)
        self._selector.register(self._out, selectors.EVENT_READ)
        self._selector.register(self._err, selectors.EVENT_READ)
        self._tail = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def exchange(self, line: bytes) -> bytes:
        """Send a line and return the one that answers it, both without the newline. Raises WorkerError."""
        seconds, self._next = self._next, self._limit
        try:
            return self._exchange(memoryview(line + b"\n"), seconds)
        except BaseException:  # whatever it was, Ctrl-C included: the next line would be the answer to this one
            self.stop()
            raise

    def stop(self, grace: float = 0.0) -> None:
        """End it; ``grace``: seconds in which it may do so by itself, once its input is closed."""
        self._selector.close()
        if self._stop.detach() is not None:
            _end(self._process, self._guard, self._folder, grace)

    def _exchange(self, left: memoryview, seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        answer = bytearray()
        done = False
        left = self._write(left)
        if left:
            self._selector.register(self._in, selectors.EVENT_WRITE)
        while left or not done:
            wait = deadline - time.monotonic()
            if wait <= 0:
                raise EngineHung(f"the engine gave no answer in {seconds:g} s{self._last_words()}")
            ready = self._selector.select(min(wait, LOOK))
            if not ready and self._process.poll() is not None:  # something that it started holds its output open
                raise self._death()
            for key, _ in ready:
                if key.fd == self._in:
                    left = self._write(left)
                    if not left:
                        self._selector.unregister(self._in)
                elif key.fd == self._err:
                    self._read_stderr()
                elif chunk := os.read(self._out, 1 << 18):
                    done = self._take(answer, chunk, done)
                else:
                    raise self._death()
        return bytes(answer)

    @staticmethod
    def _take(answer: bytearray, chunk: bytes, done: bool) -> bool:
        """Is the answer whole with this chunk?"""
        end = chunk.find(b"\n")
        if done or 0 <= end < len(chunk) - 1:
            raise BadAnswer(
                f"the engine wrote more than one line: {bytes(chunk[end + 1 :][:60])!r} (stdout is for answers alone)"
            )
        if len(answer) + len(chunk) > MAX_LINE:
            raise BadAnswer(
                f"the engine wrote {MAX_LINE >> 20} MiB without an end of the line, which begins {bytes(answer[:40])!r}"
            )
        answer += chunk[:end] if end >= 0 else chunk
        return end >= 0

    def _write(self, data: memoryview) -> memoryview:
        try:
            return data[os.write(self._in, data) :]
        except BlockingIOError:
            return data
        except BrokenPipeError:  # it is dead or dying, which the end of its output will tell
            return data[len(data) :]

    def _read_stderr(self) -> bool:
        """Keep the end of what is there; was there anything?"""
        try:
            chunk = os.read(self._err, 1 << 16)
        except BlockingIOError:
            return False
        if not chunk:
            with contextlib.suppress(KeyError):
                self._selector.unregister(self._err)
        self._tail = (self._tail + chunk)[-TAIL:]
        return bool(chunk)

    def _death(self) -> EngineDied:
        try:
            code = self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            return EngineDied(f"the engine closed its output and went on{self._last_words()}")
        return EngineDied(f"the engine {_how(code)}{self._last_words()}")

    def _last_words(self) -> str:
        for _ in range(64):  # a process that goes on may write for ever
            if not self._read_stderr():
                break
        lines = [line for line in self._tail.decode(errors="replace").splitlines() if line.strip()]
        said = " | ".join(" ".join(line.split()) for line in lines[-3:])
        said = "".join(letter if letter.isprintable() else "?" for letter in said)[-300:]
        return f"; its stderr ends: {said}" if said else ""


def _how(code: int) -> str:
    if code < 0:
        name = _signal(-code)
        return f"was killed by {name}" + (" (from outside; out of memory?)" if -code == signal.SIGKILL else "")
    return f"exited with code {code}" + (f" (a shell's word for {_signal(code - 128)})" if code > 128 else "")


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
