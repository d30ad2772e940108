"""``kv-harness validate CHECKPOINT``: the mask bug, on a real checkpoint, with a report that cannot be empty.

Exit code 0 for PASS; 1 for FAIL, VACUOUS and INCONCLUSIVE; 2 with one line for what cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness.commands import UsageError, limit_option, out_option
from harness.findings import Verdict
from harness.targets.naming import LIMIT
from harness.validation.plan import Asked, Plan, PlanError, chunks_of, make_plan, shows_nothing
from harness.validation.sides import REFERENCE, EngineError, Sides, sides_of, with_control
from harness.words import plain

if TYPE_CHECKING:
    from harness.validation.engine import Engine

FREE = 0.8  # of the free memory is what a validation may take unless somebody says otherwise
DTYPES = ("float32", "float16", "bfloat16")


def register(commands: Any, device_option: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the command to the subparsers of the command line."""
    parser = commands.add_parser("validate", help="run a checkpoint under a bounded KV cache, with a report")
    parser.set_defaults(act=act)
    default = Asked()
    parser.add_argument("checkpoint", help="a directory or a hub id")
    for option, value, meaning in (
        ("--max-kv-size", default.max_kv_size, "P: keys that the server lets a sequence hold"),
        ("--prefill-chunk-size", default.prefill_chunk_size, "C: tokens of a prefill forward"),
        ("--tokens", default.tokens, "N: tokens of the prompt"),
        ("--decode", default.decode, "K: tokens decoded behind it"),
    ):
        name = meaning[0]
        parser.add_argument(option, type=int, default=value, metavar=name, help=f"{meaning} (default: {value})")
    parser.add_argument(
        "--engine",
        metavar="NAME",
        help="what runs it: reference, mlx_lm, or wire:COMMAND, which serves it (default: reference)",
    )
    parser.add_argument(
        "--before",
        metavar="SIDE",
        help="also run this side, and compare: a mask policy of the engine (live, offset; of mlx_lm also library, its "
        "own caches, untrimmed), another ENGINE, or ENGINE@POLICY",
    )
    parser.add_argument(
        "--after",
        default="live",
        metavar="SIDE",
        help="the side that is judged: live, offset, ENGINE or ENGINE@POLICY (default: live)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: as stored; float32 has its logits compared as well")
    parser.add_argument("--memory", type=float, metavar="GB", help="at most (default: 80 %% of what is free)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: 0)")
    limit_option(parser)
    out_option(parser)
    device_option(parser)


def act(arguments: argparse.Namespace) -> int:
    """Validate, print the verdict and the acceptance table; UsageError for what cannot be used."""
    with contextlib.ExitStack() as stack:
        return _act(arguments, stack)


def _act(arguments: argparse.Namespace, stack: contextlib.ExitStack) -> int:
    asked, named, started = _asked(arguments), _sides(arguments), time.monotonic()
    try:
        from harness import checkpoints
        from harness.targets.device import use_device
        from harness.targets.naming import TargetError
        from harness.validation import engines
    except ImportError as error:
        raise UsageError(f"MLX cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'") from error
    from harness.validation import run as validation
    from harness.validation.record import Validation, record_of_nothing

    try:
        if arguments.device is not None:
            try:
                use_device(arguments.device)
            except TargetError as error:
                raise UsageError(f"argument --device: {error}") from error
        engine = engines.open_judged(named, arguments.checkpoint, arguments.dtype, arguments.limit)
        stack.callback(engine.close)
        if (other := engines.open_other(named, engine, arguments.dtype, arguments.limit)) is not None:
            stack.callback(other.close)
        before = None if named.before is None else named.before.policy
        sides = with_control(before, named.after.policy, engine.policies, None if other is None else other.policies)
        out, command = arguments.out, _command(arguments, named)
        if (nothing := shows_nothing(asked)) is not None:
            wanted = Validation(engine, Plan(asked, chunks_of(asked), ()), sides, out, command, 0, other)
            _say(_reads(engine))
            wanted.begin()
            wanted.write(record_of_nothing(wanted, nothing, time.monotonic() - started))
            print(f"{Verdict.VACUOUS}  {plain(f'{engine.title}: {nothing}')}\nreport in {wanted.file('md')}")
            return 1
        plan = make_plan(asked, images=engine.no_images is None)
        estimate = validation.estimate(engine, plan, other)
        _check_memory(estimate, arguments.memory, checkpoints.free_bytes())
        _say(_reads(engine))
        wanted = Validation(engine, plan, sides, out, command, estimate, other)
        record = validation.run(wanted, _say)
    except KeyboardInterrupt:
        _say("interrupted; there is no report, and the same command goes on behind the programs that are finished")
        raise
    except (checkpoints.CheckpointError, EngineError, TargetError, PlanError) as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        where = error.filename or arguments.out
        raise UsageError(f"cannot write reports: {where}: {error.strerror or error}") from error
    for row in record["acceptance"]:
        print(plain(f"{row['result']:<13} {row['criterion']} ({row['decisive_steps']:,} decisive): {row['evidence']}"))
    for found in record["findings"]:
        print(f"replay        {found['property']}, {found['program']}: {found['replay']}")
    told = plain(f"{engine.title}: {record['verdict_reason']}")
    print(f"{record['verdict']}  {told}\nreport in {wanted.file('md')}")
    return 0 if record["verdict"] == Verdict.PASS else 1


def _asked(arguments: argparse.Namespace) -> Asked:
    if not 0 <= arguments.seed < 2**32:
        raise UsageError(f"argument --seed: must lie in [0, 2**32), got {arguments.seed}")
    if arguments.memory is not None and not arguments.memory > 0:
        raise UsageError(f"argument --memory: must be a number of GB above 0, got {arguments.memory}")
    asked = Asked(
        arguments.max_kv_size, arguments.prefill_chunk_size, arguments.tokens, arguments.decode, arguments.seed
    )
    try:
        shows_nothing(asked)  # refuses what no program can be made of, before anything is opened
    except PlanError as error:
        raise UsageError(str(error)) from error
    return asked


def _sides(arguments: argparse.Namespace) -> Sides:
    try:
        return sides_of(arguments.engine, arguments.before, arguments.after)
    except EngineError as error:
        raise UsageError(str(error)) from error


def _check_memory(estimate: int, asked: float | None, free: int) -> None:
    most = asked * 1e9 if asked is not None else FREE * free
    if estimate > most:
        told = "--memory" if asked is not None else f"{FREE:.0%} of what is free"
        raise UsageError(
            f"this needs about {estimate / 1e9:.3g} GB, and {most / 1e9:.3g} GB is {told}; ask for fewer --tokens, or "
            "for more --memory"
        )


def _command(arguments: argparse.Namespace, sides: Sides) -> str:
    """What does it again; --memory, --out and what is left out have no say in the result."""
    parts = ["kv-harness", "validate", arguments.checkpoint]
    parts += ["--max-kv-size", arguments.max_kv_size, "--prefill-chunk-size", arguments.prefill_chunk_size]
    parts += ["--tokens", arguments.tokens, "--decode", arguments.decode]
    engine, before = sides.after.engine, sides.before
    parts += [] if engine == REFERENCE else ["--engine", engine]
    parts += [] if {engine, sides.other} <= {REFERENCE, None} else _limit(arguments.limit)
    parts += [] if before is None else ["--before", before.policy if sides.other is None else before]
    parts += ["--after", sides.after.policy, *(("--dtype", arguments.dtype) if arguments.dtype else ())]
    parts += ["--seed", arguments.seed, *(("--device", arguments.device) if arguments.device else ())]
    return shlex.join(map(str, parts))


def _limit(seconds: float) -> list[object]:
    return [] if seconds == LIMIT else ["--limit", f"{seconds:g}"]


def _reads(engine: Engine) -> str:
    return f"{engine.title}: {engine.family}; reading the fingerprint of {engine.files.weights.bytes:,} bytes"


def _say(text: str) -> None:
    print(f"validate: {plain(text)}", file=sys.stderr, flush=True)
