"""Writes a file so that a reader sees the old one or the new one, never half of one."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO


def read_text(path: Path) -> str:
    """What a file holds, in UTF-8. OSError also for what is no regular file (a pipe would be waited for, for ever),
    FileNotFoundError for none; UnicodeDecodeError passes through."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path.read_text(encoding="utf-8")


def write_atomically(path: Path, text: str) -> None:
    """Replace ``path`` by ``text`` (UTF-8, newlines as they are); missing parent folders are created.

    On any failure, Ctrl-C included, the temporary file is removed and what was at ``path`` stays.  OSError
    passes through; text that UTF-8 cannot hold raises UnicodeEncodeError before anything is touched.
    """
    data = text.encode("utf-8")
    path.parent.mkdir(parents=True, exist_ok=True)

    def write(file: BinaryIO) -> None:
        file.write(data)

    replace(path, write)


def replace(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Replace ``path`` by what ``write`` puts into the file that it is given.

    On any failure, Ctrl-C included, the temporary file is removed and what was at ``path`` stays; errors pass through.
    """
    # Not tempfile: it makes files that only their owner can read, and a report is there to be read.  The same
    # folder, because only a rename within one file system is atomic.
    temporary = path.parent / f".{secrets.token_hex(8)}.tmp"
    try:
        with temporary.open("xb") as file:
            write(file)
            file.flush()
            # Before the rename, or a power cut could leave the new name on an empty file.
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is not None:
            error.filename, error.filename2 = str(path), None  # nobody asked for the temporary file
        raise


def check_writable(out: Path, reports: Sequence[Path], kinds: Sequence[str]) -> None:
    """Find out now, not after the first report, that reports of these kinds of files cannot be written: OSError."""
    try:
        str(out).encode("utf-8")
    except UnicodeEncodeError as error:
        raise OSError(errno.EILSEQ, "the name of the folder is not UTF-8", repr(str(out))) from error
    for folder in dict.fromkeys((*(out / report.parent for report in reports), out / "findings")):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    for path in (out / report.with_name(f"{report.name}.{kind}") for report in reports for kind in kinds):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "is a folder, a report would go there", str(path))
