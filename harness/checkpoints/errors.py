"""The one error of this package, and files read without surprises."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

#: Larger than any published config or index by far; a file beyond it is not read.
MOST_JSON_BYTES = 64 << 20


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message is one line that names the file and, if there is one, the key."""


def read_json(path: Path) -> tuple[Any, bytes]:
    """The JSON value of a file and its bytes. CheckpointError when it cannot be read or is not JSON."""
    raw = read_bytes(path, MOST_JSON_BYTES)
    return parse_json(raw, str(path)), raw


def read_bytes(path: Path, most: int) -> bytes:
    """The bytes of a regular file, at most ``most``. CheckpointError when it has more, or cannot be read."""
    try:
        with open_regular(path) as file:
            raw = file.read(most + 1)  # not its size: a file may grow, and those of /proc have none
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if len(raw) > most:
        raise CheckpointError(f"{path}: is longer than such a file may be ({most:,} bytes)")
    return raw


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read bytes. CheckpointError if it is, behind all links, no regular file; OSError.

    A pipe that nobody writes to would wait for ever, a device may have no end.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise CheckpointError(f"{path}: is not a regular file; put a plain file there")
    # Without waiting, should a pipe have taken the file's place since.
    return os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)), "rb")


def exists(path: Path) -> bool:
    """Whether something that can be looked at is there: False as well where Path.exists raises, as for a long name."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True


def parse_json(raw: bytes, where: str) -> Any:
    """The JSON value of some bytes. CheckpointError, beginning with ``where``, for anything else or a repeated key."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"{where}: duplicate key {twice!r:.200}")
        return found

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except CheckpointError:
        raise
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: is not JSON: not UTF-8 at byte {error.start}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: is not JSON: {str(error) or type(error).__name__}") from error
