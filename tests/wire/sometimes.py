"""The toy worker, wrong once in the life of a file: ``sometimes.py FILE THEN``.

The first chunk behind a trim tells positions that are wrong, and the file is made. Where it is there, such a chunk is
right (THEN: ``right``), ends the worker (``gone``), or is as wrong as the first one, and a worker that is started takes
two seconds for it, as on a machine that is busy (``slow``).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from harness.wire.examples import toy


def main(file: Path, then: str) -> None:
    session: toy.Toy | None = None
    trimmed = False
    if then == "slow" and file.exists():
        time.sleep(2)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        do = request["do"]
        trimmed = (do == "trim_front" and request["n"] > 0) or (trimmed and do != "open")
        session, said = toy.answer(session, request)
        if do == "forward" and trimmed and (count := len(request["tokens"])) > 1:
            if then == "slow" or not file.exists():
                file.touch()
                said["positions"][0]["positions"] = toy.array("int64", "q", [count], range(900, 900 + count))
            elif then == "gone":
                sys.exit(3)
        print(json.dumps({"id": request["id"], **said}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
