"""All weight files of a checkpoint as one table of tensors: single file or shards, with or without an index."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

from harness.checkpoints.errors import CheckpointError, exists, read_json
from harness.checkpoints.safetensors import Tensor, read_header

INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors$")


@dataclass(frozen=True)
class Weights:
    """Every tensor by its name in the files; the files in order; the index, if there is one."""

    tensors: dict[str, Tensor]
    files: tuple[Path, ...]
    index: Path | None

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.bytes for tensor in self.tensors.values())


def read_weights(folder: Path) -> Weights:
    """Read and check the headers of all weight files. CheckpointError names file and key."""
    index = folder / INDEX
    # A link that leads nowhere is an index as well: without it, other files might be read than the ones that it names.
    placed = _read_index(inside(folder, INDEX, folder)) if os.path.lexists(index) else None
    names = sorted(set(placed.values())) if placed is not None else _find_files(folder)
    files = []
    for name in names:
        path = inside(folder, name, index if placed is not None else folder)
        if not path.is_file():
            keys = [key for key, file in (placed or {}).items() if file == name]
            told = f"; {index.name} places {len(keys)} keys in it, first {keys[0]!r:.200}" if keys else ""
            told = told or f"; there is no {INDEX} that says otherwise"
            raise CheckpointError(f"{path}: missing shard, or not a file{told}")
        files.append(path)
    tensors: dict[str, Tensor] = {}
    for path in files:
        for key, tensor in read_header(path).items():
            if key in tensors:
                raise CheckpointError(
                    f"{path}: duplicate key {key!r:.200}, which is in {tensors[key].file.name} as well"
                )
            tensors[key] = tensor
    if placed is not None:
        _check_index(index, placed, tensors)
    return Weights(tensors, tuple(files), index if placed is not None else None)


def missing_file(folder: Path) -> str | None:
    """The first weight file that the folder should have and has not; None when all are there, whatever is in them."""
    index = folder / INDEX
    there = exists(index)
    if os.path.lexists(index) and not there:
        return INDEX
    try:
        names = sorted(set(_read_index(inside(folder, INDEX, folder)).values())) if there else _find_files(folder)
        return next((name for name in names if not inside(folder, name, folder).is_file()), None)
    except CheckpointError:
        # Nothing that looks like weights; or an index that cannot be used, which ``read_weights`` says better.
        return None if there else "model.safetensors"


def _read_index(index: Path) -> dict[str, str]:
    data, _ = read_json(index)
    placed = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(placed, dict) or not all(isinstance(file, str) for file in placed.values()):
        raise CheckpointError(f"{index}: weight_map must map every key to a file name")
    if not placed:
        raise CheckpointError(f"{index}: weight_map is empty")
    return placed


def _find_files(folder: Path) -> list[str]:
    """Weight files of a folder without an index: ``model*.safetensors``, else all; every shard of a numbered set, the
    missing ones too."""
    for pattern in ("model*.safetensors", "*.safetensors"):
        names = sorted(path.name for path in folder.glob(pattern))
        if names:
            break
    else:
        raise CheckpointError(f"{folder}: no .safetensors file in it")
    if "model.safetensors" in names:
        return ["model.safetensors"]
    for name in names:
        if match := _SHARD.match(name):
            count, stem = int(match["count"]), match["stem"]
            wanted = (f"{stem}-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
            if missing := next((other for other in wanted if other not in names), None):
                return [missing, *names]  # one is enough to refuse the folder
    return names


def inside(folder: Path, name: str, source: Path) -> Path:
    """The path of a file of a checkpoint, which may be missing. CheckpointError, beginning with ``source``, if it leads
    out of the folder, by its name or by a link, or cannot be a file at all.

    Links from ``snapshots/<commit>`` to ``blobs`` are how the hub cache stores a repository, and are allowed.
    """
    parts = PurePosixPath(name)
    outside = parts.is_absolute() or PureWindowsPath(name).is_absolute() or ".." in re.split(r"[/\\]", name)
    if outside or not name or "\0" in name:
        raise CheckpointError(f"{source}: file name {name!r:.200} leads out of the checkpoint's directory")
    path, root = folder / name, folder.resolve()
    try:
        name.encode()
        target = path.resolve()
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        target = path.resolve()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"{source}: file name {name!r:.200} is not Unicode; rename the file") from error
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        reason = getattr(error, "strerror", None) or "it is a link to itself"
        raise CheckpointError(f"{source}: file {name!r:.200} cannot be followed: {reason}") from error
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if not any(target.is_relative_to(base) for base in allowed):
        raise CheckpointError(f"{source}: file {name!r:.200} is a link that leads out of the checkpoint's directory")
    return path


def _check_index(index: Path, placed: dict[str, str], tensors: dict[str, Tensor]) -> None:
    for key, file in placed.items():
        if key not in tensors:
            raise CheckpointError(f"{index.parent / file}: missing key {key!r:.200}, which {index.name} places there")
        if tensors[key].file.name != PurePosixPath(file).name:
            raise CheckpointError(f"{index}: key {key!r:.200} is in {tensors[key].file.name}, not in {file}")
    for key, tensor in tensors.items():
        if key not in placed:
            raise CheckpointError(f"{tensor.file}: unexpected key {key!r:.200}, which {index.name} does not list")
