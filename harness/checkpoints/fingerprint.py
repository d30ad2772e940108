"""The fingerprint of a checkpoint: SHA-256 of its config, of its index and of every weight file.

Digests of weight files are kept by path, size and modification time in a file of the user's cache directory (never in
the checkpoint's), so that a file is read once. A cache that cannot be read or written is only slower.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoints.errors import MOST_JSON_BYTES, CheckpointError, open_regular, read_bytes
from harness.checkpoints.files import Files

_BLOCK = 1 << 22


@dataclass(frozen=True)
class Fingerprint:
    """Hexadecimal SHA-256 by file name; ``digest`` is that of the lines ``name  digest``, sorted by name."""

    files: dict[str, str]

    @property
    def digest(self) -> str:
        """One number for the whole checkpoint; where it lies plays no part."""
        lines = "".join(f"{name}  {digest}\n" for name, digest in sorted(self.files.items()))
        return hashlib.sha256(lines.encode()).hexdigest()


def cache_file() -> Path:
    """Where digests are kept: ``$KV_HARNESS_CACHE``, or the user's cache directory."""
    if own := os.environ.get("KV_HARNESS_CACHE"):
        return Path(own).expanduser() / "digests.json"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "mlx-kv-harness" / "digests.json"


def fingerprint(checkpoint: Files) -> Fingerprint:
    """Digest every file that makes the checkpoint. Streams the weights. CheckpointError if one cannot be read."""
    files = {checkpoint.config_path.name: hashlib.sha256(checkpoint.config_bytes).hexdigest()}
    known = _read_cache()
    fresh: dict[str, list[int | str]] = {}
    paths = list(checkpoint.weights.files)
    if checkpoint.weights.index is not None:
        paths.insert(0, checkpoint.weights.index)
    for path in paths:
        try:
            real = path.resolve()
            stat = real.stat()
            entry = known.get(str(real))
            if entry and entry[:2] == [stat.st_size, stat.st_mtime_ns]:
                digest = str(entry[2])
            else:
                digest = _digest(real)
                fresh[str(real)] = [stat.st_size, stat.st_mtime_ns, digest]
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        files[path.relative_to(checkpoint.path).as_posix()] = digest
    if fresh:
        _write_cache(known | fresh)
    return Fingerprint(files)


def _digest(path: Path) -> str:
    made = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(_BLOCK):
            made.update(block)
    return made.hexdigest()


def _read_cache() -> dict[str, list[int | str]]:
    try:
        data = json.loads(read_bytes(cache_file(), MOST_JSON_BYTES))
    except (CheckpointError, ValueError, RuntimeError):  # RuntimeError: no home directory, or JSON that is too deep
        return {}
    if not isinstance(data, dict):
        return {}
    return {key: value for key, value in data.items() if isinstance(value, list) and len(value) == 3}


def _write_cache(entries: dict[str, list[int | str]]) -> None:
    with contextlib.suppress(OSError, RuntimeError):
        file = cache_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.name)
        try:
            with os.fdopen(handle, "w") as out:
                json.dump(entries, out)
            Path(name).replace(file)  # in one step, so that a reader never sees half of it
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
