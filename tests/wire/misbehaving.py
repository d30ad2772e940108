"""The toy worker, which does something else than answer where it meets what its first argument names.

    python misbehaving.py MODE WHEN

WHEN: ``hello``, ``wide`` (a chunk behind a trim: the historic bug makes a mask wider than the keys there), ``forward``,
``tell`` (whenever it is to tell of its caches).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NoReturn

from harness.wire.examples import toy

GIGABYTE = 1 << 30


def abort() -> NoReturn:
    print("terminate called\nlast words of the engine", file=sys.stderr, flush=True)
    os.abort()


def leave_a_child() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stdin=subprocess.DEVNULL)
    print(f"child {child.pid}", file=sys.stderr, flush=True)
    os.abort()


def hang() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)


def endless() -> None:
    for _ in range(GIGABYTE >> 20):
        sys.stdout.write("x" * (1 << 20))
    sys.stdout.flush()
    hang()


def write(text: str, *, leave: bool = False) -> Callable[[], None]:
    def act() -> None:
        sys.stdout.write(text)
        sys.stdout.flush()
        if leave:
            os._exit(0)

    return act


def flood() -> None:
    sys.stderr.write("a line of a log\n" * 400_000)


MODES: dict[str, Callable[[], Any]] = {
    "abort": abort,
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: os._exit(3),
    "child": leave_a_child,
    "hang": hang,
    "endless": endless,
    "garbage": write("Loading checkpoint shards: 100%\n"),
    "half": write('{"id": 7, "logi', leave=True),
    "two": write('{"id": 1}\n{"id": 2}\n'),
    "deep": write("[" * 200_000 + "\n"),
    "flood": flood,  # and then it answers, as it does in these, wrongly
    "version": lambda: None,
    "id": lambda: None,
}


def main(mode: str, when: str) -> None:
    session: toy.Toy | None = None
    trimmed = False
    for line in sys.stdin:
        request = json.loads(line)
        do = request["do"]
        trimmed = (do == "trim_front" and request["n"] > 0) or (trimmed and do != "open")
        wide = do == "forward" and trimmed and len(request["tokens"]) > 1
        met = {"hello": do, "wide": "wide" if wide else "", "forward": do, "tell": "tell" if "tell" in request else ""}
        if met[when] == when:
            MODES[mode]()
            if mode not in ("flood", "version", "id"):
                continue
        session, said = toy.answer(session, request)
        if mode == "version" and do == "hello":
            said["protocol"] = 2
        print(json.dumps({"id": request["id"] + (mode == "id" and met[when] == when), **said}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
