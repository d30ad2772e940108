"""The one error of this package, and JSON files read without surprises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

#: Larger than any published config or index by far; a file beyond it is not read.
MOST_JSON_BYTES = 64 << 20


class CheckpointError(Exception):
    """A checkpoint that cannot be used; the message is one line that names the file and, if there is one, the key."""


def read_json(path: Path) -> tuple[Any, bytes]:
    """The JSON value of a file and its bytes. CheckpointError when it cannot be read or is not JSON."""
    try:
        size = path.stat().st_size
        if size > MOST_JSON_BYTES:
            raise CheckpointError(f"{path}: {size:,} bytes are more than a file of JSON may have ({MOST_JSON_BYTES:,})")
        raw = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    return parse_json(raw, str(path)), raw


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
