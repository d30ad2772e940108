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
from tests.parity.table import absent, markdown, summary, write_block

README = Path(__file__).parents[2] / "reference_models" / "README.md"
NAMES = {peer.name: peer for peer in PEERS}
Task = tuple[str, str, str]
PARTS: dict[str, tuple[str, ...]] = {"families": FAMILIES, "peers": tuple(NAMES), "modalities": MODALITIES}


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
    narrowed = [f"--{name}" for name, every in PARTS.items() if sorted(getattr(options, name)) != sorted(every)]
    narrowed += ["--example"] * (options.example is not None)
    if options.write and narrowed:
        said = f"error: --write replaces the whole table, so it goes without {', '.join(narrowed)}"
        print(said, file=sys.stderr)
        return 2
    started = time.monotonic()
    for line in absent([_absent(task) for task in tasks if missing(NAMES[task[0]])]):
        print(line, file=sys.stderr)
    rows = _run(tasks, options)
    text = markdown(rows, options.examples, options.seed, options.example)
    print(text, flush=True)
    failures = [(row, failure) for row in rows for failure in row.failures]
    for row, failure in failures:
        print(f"\nFAIL {row.family}, {row.peer}, {row.modality}: {failure.text}", file=sys.stderr)
        print(f"  again: {again(row, options.seed, failure.number)}", file=sys.stderr)
    print(f"\n{time.monotonic() - started:.0f} s on {options.jobs} processes", file=sys.stderr)
    print(summary(rows), file=sys.stderr)
    if failures or any(row.version is None for row in rows):
        return 1
    if options.write:
        write_block(README, text)
    return 0


def again(row: Row, seed: int, number: int) -> str:
    """The command that repeats one draw of a row and nothing else."""
    return (
        f"python -m tests.parity --families {row.family} --peers {row.peer} --modalities {row.modality}"
        f" --seed {seed} --example {number}"
    )


def _absent(task: Task) -> Row:
    peer, family, modality = task
    return Row(family, peer, None, modality)


def _run(tasks: Sequence[Task], options: argparse.Namespace) -> list[Row]:
    """Rows in the order of the tasks, each in one of several processes."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context, initializer=_prepare) as pool:
        made = [
            None
            if missing(NAMES[task[0]])
            else pool.submit(_row, task, options.examples, options.seed, options.example)
            for task in tasks
        ]
        return [
            future.result() if future is not None else _absent(task) for future, task in zip(made, tasks, strict=True)
        ]


def _row(task: Task, examples: int, seed: int, example: int | None) -> Row:
    peer, family, modality = task
    started = time.monotonic()
    row = run_row(NAMES[peer], family, modality, examples, seed, example)
    took = time.monotonic() - started
    print(f"{family}, {peer}, {modality}: {row.compared or 'nothing'} compared in {took:.0f} s", file=sys.stderr)
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
    parser.add_argument("--example", type=_number, metavar="N", help="nothing but the draw of this number, from 0")
    for name, known in PARTS.items():
        parser.add_argument(f"--{name}", type=_some(known), default=known, metavar="A,B", help=", ".join(known))
    parser.add_argument("--write", action="store_true", help="also into reference_models/README.md, if all agree")
    return parser


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _number(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _some(known: Sequence[str]):  # type: ignore[no-untyped-def]
    def read(text: str) -> tuple[str, ...]:
        names = tuple(name.strip() for name in text.split(","))
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return names

    return read
