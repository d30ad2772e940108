"""What loading costs: peak resident memory and time, ours beside mlx-lm's ``load_model``, in one run.

Synthesises a checkpoint of about the given size in a temporary directory (removed at the end), then loads it in a
fresh process per loader and round, in turn, so that both meet the same page cache and the same machine load.  Every
loader evaluates all weights.  Prints the best and the median time, the least processor time (which other processes
disturb less) and the largest peak; what the process holds before loading (interpreter, libraries) is printed as well,
and taken off for the ratio.

    python tests/bench/load.py [--gb 2] [--family qwen3_vl] [--sizes published] [--bits N] [--dtype bfloat16]
                               [--rounds 6]

A family with a vision tower is made without it: mlx-lm reads its text alone, and both must read the same bytes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")
ROOT = Path(__file__).parents[2]
LOADERS = ("ours", "ours, every weight checked for NaN", "mlx-lm")


def resident(field: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM at its peak. On other systems the peak alone, from getrusage."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def load(loader: str, folder: Path) -> dict[str, float]:
    """Load in this process. Imports come before the clock."""
    if loader == "mlx-lm":
        from mlx_lm.utils import load_model

        before, started, spent = resident("VmRSS"), time.perf_counter(), time.process_time()
        model = load_model(folder)
    else:
        from harness import checkpoints

        before, started, spent = resident("VmRSS"), time.perf_counter(), time.process_time()
        model = checkpoints.load_model(checkpoints.open_checkpoint(folder))
        if loader != "ours":
            assert not checkpoints.not_a_number(model)
    seconds, cpu = time.perf_counter() - started, time.process_time() - spent
    assert model is not None
    return {"seconds": seconds, "cpu": cpu, "before": before, "peak": resident("VmHWM")}


def make(folder: Path, family: str, gb: float, dtype: str, bits: int | None, sizes: str) -> int:
    """A checkpoint with the dimensions of ``sizes`` and as many layers as ``gb`` asks for; bytes of its weights."""
    from harness.checkpoints import open_checkpoint, synthesise
    from reference_models.hf.sizes import SIZES

    config = SIZES[sizes][family]()
    if hasattr(config, "vision"):
        config = dataclasses.replace(config, vision=None)
    with tempfile.TemporaryDirectory() as trial:  # one layer and two: the difference is a layer
        made = []
        for layers in (1, 2):
            one = dataclasses.replace(config, num_hidden_layers=layers)
            synthesise(family, Path(trial) / str(layers), config=one, dtype=dtype, bits=bits, sizes=sizes)
            made.append(open_checkpoint(Path(trial) / str(layers)).weights.bytes)
    layers = max(1, round((gb * 1e9 - made[0]) / (made[1] - made[0])) + 1)
    config = dataclasses.replace(config, num_hidden_layers=layers)
    synthesise(family, folder, config=config, dtype=dtype, bits=bits, sizes=sizes, shard_bytes=1 << 30)
    return open_checkpoint(folder).weights.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=2.0, help="of weights, 10**9 bytes (default: 2)")
    parser.add_argument("--family", default="qwen3_vl", help="one whose layers are alike (default: qwen3_vl)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bits", type=int)
    parser.add_argument("--sizes", choices=("tiny", "published"), default="published", help="tiny: does it run at all?")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--child", nargs=2, metavar=("LOADER", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(load(arguments.child[0], Path(arguments.child[1]))))
        return

    from tabulate import tabulate

    with tempfile.TemporaryDirectory(prefix="kv-harness-load-") as scratch:
        folder = Path(scratch) / "checkpoint"
        size = make(folder, arguments.family, arguments.gb, arguments.dtype, arguments.bits, arguments.sizes)
        results: dict[str, list[dict[str, float]]] = {loader: [] for loader in LOADERS}
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        for turn in range(arguments.rounds):
            first = turn % len(LOADERS)  # nobody is always the one that comes after the slow one
            for loader in LOADERS[first:] + LOADERS[:first]:
                command = [sys.executable, __file__, "--child", loader, str(folder)]
                done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
                if done.returncode:
                    reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
                    print(f"{loader}: cannot load: {reason}", file=sys.stderr)
                    continue
                results[loader].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{arguments.family}, {size / 1e9:.2f} GB of weights, {arguments.rounds} rounds\n")
    rows = []
    for loader, found in results.items():
        if found:
            best = min(result["seconds"] for result in found)
            median = statistics.median(result["seconds"] for result in found)
            peak = max(result["peak"] for result in found)
            added = max(result["peak"] - result["before"] for result in found)
            held = min(result["before"] for result in found)
            cpu = min(result["cpu"] for result in found)
            numbers = [f"{n:.2f}" for n in (best, median, cpu, held / 1e9, peak / 1e9)]
            rows.append([loader, *numbers, f"{added / size:.3f}"])
    headers = ["loader", "best s", "median s", "best CPU s", "GB before", "GB at peak", "added / weights"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
