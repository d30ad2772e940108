"""``kv-harness synth | identify | logits``: checkpoints on disk or on the hub.

Exit code 0, or 2 with one line that names file and key. Notes and warnings go to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.commands import UsageError
from harness.words import plain

_INPUT = (
    "ids [B, T]; with images pixel_values and image_grid_thw, with videos pixel_values_videos and video_grid_thw, as "
    "the processors of transformers make them"
)


def register(commands: Any, device_option: Callable[[argparse.ArgumentParser], None]) -> None:
    """Add the commands to the subparsers of the command line."""
    synth = commands.add_parser("synth", help="write a small random checkpoint of a family")
    synth.add_argument("family")
    synth.add_argument("dir", type=Path, help="a new or empty directory")
    synth.add_argument("--bits", type=int, metavar="N", help="quantise as MLX does: 2, 3, 4, 5, 6 or 8")
    synth.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights (default: 0)")
    synth.add_argument("--layout", choices=("hf", "mlx"), help="default: mlx with --bits, else what most loaders read")
    synth.add_argument(
        "--sizes",
        choices=("tiny", "heads", "published"),
        default="tiny",
        help="heads: those of published models, all else tiny; published: real dims, few layers",
    )
    synth.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: by --sizes")
    synth.set_defaults(act=_synth)

    identify = commands.add_parser("identify", help="say what a checkpoint is, with its fingerprint")
    identify.add_argument("path", help="a directory or a hub id")
    identify.add_argument("--json", action="store_true", help="for a machine")
    identify.set_defaults(act=_identify)

    logits = commands.add_parser("logits", help="logits of a checkpoint for given token ids")
    logits.add_argument("path", help="a directory or a hub id")
    logits.add_argument("--input", type=Path, required=True, metavar="FILE.npz", help=_INPUT)
    logits.add_argument("--output", type=Path, required=True, metavar="FILE.npz", help="logits [B, T, V], float32")
    logits.add_argument("--engine", choices=("reference",), default="reference")
    logits.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), help="default: as stored")
    device_option(logits)
    logits.set_defaults(act=_logits)


def _checkpoints() -> Any:
    """The package, loaded when a command needs it: it brings MLX."""
    try:
        from harness import checkpoints
    except ImportError as error:
        raise UsageError(f"MLX cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'") from error
    return checkpoints


def _open(path: str) -> Any:
    package = _checkpoints()
    try:
        checkpoint = package.open_checkpoint(path)
        package.check(checkpoint)
    except package.CheckpointError as error:
        raise UsageError(str(error)) from error
    for note in checkpoint.notes:
        print(f"note: {checkpoint.config_path}: {note}", file=sys.stderr)
    return checkpoint


def _synth(arguments: argparse.Namespace) -> int:
    package = _checkpoints()
    if not 0 <= arguments.seed < 2**32:
        raise UsageError(f"argument --seed: must lie in [0, 2**32), got {arguments.seed}")
    try:
        package.synthesise(
            arguments.family,
            arguments.dir,
            bits=arguments.bits,
            seed=arguments.seed,
            layout=arguments.layout,
            sizes=arguments.sizes,
            dtype=arguments.dtype,
        )
        checkpoint = package.open_checkpoint(arguments.dir)
    except (package.CheckpointError, package.UnknownFamily) as error:
        raise UsageError(str(error)) from error
    print(f"{checkpoint.family}: {checkpoint.weights.bytes:,} bytes of weights in {arguments.dir}")
    return 0


def _identify(arguments: argparse.Namespace) -> int:
    package = _checkpoints()
    checkpoint = _open(arguments.path)
    try:
        digests = package.fingerprint(checkpoint)
    except package.CheckpointError as error:
        raise UsageError(str(error)) from error
    if arguments.json:
        print(json.dumps(package.as_dict(checkpoint, digests), indent=2))
    else:
        print(package.describe(dataclasses.replace(checkpoint, name=plain(checkpoint.name)), digests))
    return 0


def _logits(arguments: argparse.Namespace) -> int:
    import numpy as np

    from harness.reporting import replace

    package = _checkpoints()
    if arguments.device is not None:
        from harness.targets import reference

        try:
            reference.use_device(arguments.device)
        except reference.TargetError as error:
            raise UsageError(f"argument --device: {error}") from error
    arrays = _arrays(arguments.input)
    checkpoint = _open(arguments.path)
    output = _output(arguments.output, arguments.input, checkpoint.path)
    try:
        inputs = package.Inputs.of(arrays)
        package.rows_of(inputs, checkpoint.model_config)
    except package.CheckpointError as error:
        raise UsageError(f"{arguments.input}: {error}") from error
    try:
        model = package.load_model(checkpoint, arguments.dtype)
        for name in package.not_a_number(model):
            print(f"warning: {checkpoint.path}: {name} holds NaN or infinity", file=sys.stderr)
        out = package.logits(model, inputs)
    except package.CheckpointError as error:
        raise UsageError(str(error)) from error
    if not np.isfinite(out).all():
        print(f"warning: {arguments.output}: the logits hold NaN or infinity", file=sys.stderr)
    try:
        replace(output, lambda file: np.savez(file, logits=out))  # a file object: savez would add a suffix to a name
    except (OSError, ValueError) as error:  # ValueError: of zipfile, as it closes on a disk that is full
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{arguments.output}: cannot be written: {reason}") from error
    print(f"{arguments.output}: logits {list(out.shape)} of {checkpoint.family}")
    return 0


def _output(path: Path, source: Path, checkpoint: Path) -> Path:
    """Where the logits go, links followed. UsageError, before anything is computed, for a file that must not be lost
    and for a place where none can be made."""
    try:
        target = path.resolve()
        if target == source.resolve() or (target.exists() and target.samefile(source)):
            raise UsageError(f"{path}: --output is the file of --input, which would be lost; name another file")
        if target.exists() and (target.is_relative_to(checkpoint.resolve()) or _is_of(checkpoint, target)):
            raise UsageError(f"{path}: --output is a file of the checkpoint, which would be lost; name another file")
        if target.exists() and not target.is_file():
            raise UsageError(f"{path}: --output is there and is not a regular file; name another file")
        if not target.parent.is_dir():
            raise UsageError(f"{path}: cannot be written: {target.parent} is not a directory")
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a link to itself
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path!s:.200}: cannot be written: {reason!s:.300}") from error
    return target


def _is_of(checkpoint: Path, target: Path) -> bool:
    """Whether a file of the checkpoint is a link to ``target``, symbolic (the hub's blobs) or hard."""
    return any(path.is_file() and path.samefile(target) for path in checkpoint.rglob("*"))


def _arrays(path: Path) -> dict[str, Any]:
    import numpy as np

    name, made = "", {}
    try:
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: is not a regular file; write it with numpy.savez(file, ids=...)")
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise UsageError(f"{path}: is not an .npz file but one array; write it with numpy.savez(file, ids=...)")
        with loaded as data:
            for name in data.files:
                made[name] = data[name]
                if not isinstance(made[name], np.ndarray):
                    raise UsageError(f"{path}: {name:.100}: is no array; write it with numpy.savez(file, ids=...)")
    except UsageError:
        raise
    except Exception as error:  # NumPy lets through what zip, codecs and Python's tokenizer raise: a kind for each
        if not name and isinstance(error, OSError):
            raise UsageError(f"{path!s:.200}: cannot be read: {error.strerror or error}") from error
        if not name:
            raise UsageError(f"{path}: is not an .npz file; write it with numpy.savez(file, ids=...)") from error
        reason = str(error) or type(error).__name__
        raise UsageError(f"{path}: {name:.100}: is no array that can be read: {reason:.300}") from error
    return made
