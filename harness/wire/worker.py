"""A worker for the targets of this package: ``python -m harness.wire.worker reference:qwen2_vl``.

The name is one of ``kv-harness run --target``; where it stands for several configurations, the simplest one answers.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # as in ``harness.cli``, and for the same reasons
os.environ.setdefault("MLX_ENABLE_TF32", "0")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from harness import __version__
from harness.targets.naming import Asked, TargetError, resolve
from harness.wire.serve import serve


def main(arguments: list[str]) -> int:
    """Serve the target that is named; returns the exit code."""
    if len(arguments) != 1:
        print("usage: python -m harness.wire.worker NAME", file=sys.stderr)
        return 2
    try:
        subject = resolve(arguments[0], Asked())
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    serve(subject.targets[0], f"kv-harness {__version__}, {subject.device}")  # which names a library with its release
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
