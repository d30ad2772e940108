"""``python -m tests.parity``: every family, peer and kind of prompt, over drawn configurations; a Markdown table.

Exit codes: 0 all agree; 1 a difference, a record that no longer holds, or a peer that is not installed; 2 unusable
input.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("MLX_DISABLE_COMPILE", "1")  # before MLX is imported; compiling costs more than it saves here

import mlx.core as mx

from reference_models.registry import FAMILIES
from tests.parity.cases import MODALITIES
from tests.parity.peers import PEERS, missing, version
from tests.parity.running import Row, run_row
from tests.parity.table import markdown, write_block

README = Path(__file__).parents[2] / "reference_models" / "README.md"
NAMES = {peer.name: peer for peer in PEERS}
Task = tuple[str, str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    tasks = [
        (peer, family, modality)
        for family in options.families
        for peer in options.peers
        for modality in NAMES[peer].modalities(family)
        if modality in options.modalities
    ]
    if not tasks:
        print("error: nothing to compare: no chosen peer takes such a prompt of a chosen family", file=sys.stderr)
        return 2
    started = time.monotonic()
    rows = _run(tasks, options)
    text = markdown(rows, options.examples, options.seed)
    print(text)
    print(f"\n{time.monotonic() - started:.0f} s on {options.jobs} processes", file=sys.stderr)
    absent = sorted({row.peer for row in rows if row.version is None})
    failures = [(row, line) for row in rows for line in row.failures]
    for row, line in failures:
        print(f"\nFAIL {row.family}, {row.peer}, {row.modality}: {line}", file=sys.stderr)
    for peer in absent:
        print(f"\nNOT COMPARED with {peer}: {', '.join(missing(NAMES[peer]))} not installed", file=sys.stderr)
    if failures or absent:
        return 1
    if options.write:
        write_block(README, text)
    return 0


def _run(tasks: Sequence[Task], options: argparse.Namespace) -> list[Row]:
    """Rows in the order of the tasks, each in one of several processes."""
    there = [not missing(NAMES[peer]) for peer, _, _ in tasks]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=_prepare) as pool:
        made = [
            pool.submit(_row, task, options.examples, options.seed) if installed else None
            for task, installed in zip(tasks, there, strict=True)
        ]
        return [
            future.result() if future is not None else Row(family, peer, None, modality)
            for future, (peer, family, modality) in zip(made, tasks, strict=True)
        ]


def _row(task: Task, examples: int, seed: int) -> Row:
    peer, family, modality = task
    started = time.monotonic()
    row = run_row(NAMES[peer], family, modality, examples, seed)
    print(f"{family}, {peer}, {modality}: {row.compared} in {time.monotonic() - started:.0f} s", file=sys.stderr)
    return row


def _prepare() -> None:
    """Progress bars and warnings of the peers would drown the table; tiny matrices gain nothing from threads; a GPU
    rounds otherwise."""
    mx.set_default_device(mx.cpu)
    logging.disable(logging.WARNING)
    if version("transformers") is not None:
        from transformers.utils import logging as theirs

        theirs.disable_progress_bar()
    if version("torch") is not None:
        import torch

        torch.set_num_threads(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=_positive, default=10, metavar="N", help="configurations a row (10)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (0)")
    parser.add_argument("--jobs", type=_positive, default=min(os.cpu_count() or 1, 8), metavar="N", help="processes")
    for name, known in (("families", FAMILIES), ("peers", tuple(NAMES)), ("modalities", MODALITIES)):
        parser.add_argument(f"--{name}", type=_some(known), default=known, metavar="A,B", help=", ".join(known))
    parser.add_argument("--write", action="store_true", help="also into reference_models/README.md, if all agree")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _some(known: Sequence[str]):  # type: ignore[no-untyped-def]
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return read
