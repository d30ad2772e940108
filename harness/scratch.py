"""Folders of temporary files that outlive nobody for long: what a process that was killed left behind, a later one
removes.

Whoever makes a folder holds a lock (``flock``) on a file in it, which the system lets go when that process ends,
however it does. A lock that can be taken therefore means that the owner is dead; a number of a process could by then be
that of another. A folder without that file is left alone: it is not ours, or not yet whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

PREFIX = "kv-harness-"
"""What the names of all of them begin with."""
LOCK = "kv-harness.owner"
"""The file that is locked; empty."""

_swept: set[Path] = set()


@dataclass(frozen=True)
class Folder:
    """A folder of this process, and the descriptor of the file that is locked."""

    path: Path
    lock: int

    def remove(self) -> None:
        """With all that is in it; once. What cannot be removed stays for a later process."""
        with contextlib.suppress(OSError):
            folder = _opened(self.path)
            try:
                _remove(self.path, folder)
            finally:
                os.close(folder)
        os.close(self.lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


def make(prefix: str = PREFIX) -> Folder:
    """A new folder where temporary files go; the first one that a process makes there first removes what dead ones have
    left. ``prefix``: of its name, which begins with PREFIX. Raises OSError."""
    parent = Path(tempfile.gettempdir())
    if parent not in _swept:
        _swept.add(parent)
        sweep(parent)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # who sweeps was here between the two lines above, and removes it
            os.close(lock)
            continue
        except OSError:  # no locks on this file system: without that file nobody takes the folder for left behind
            (path / LOCK).unlink()
            return Folder(path, lock)
        if os.fstat(lock).st_nlink:
            return Folder(path, lock)
        os.close(lock)  # as above, and it is gone already


def sweep(parent: Path) -> None:
    """Remove from this folder what processes of this user that are dead have left there. Never raises."""
    left: list[Path] = []
    with contextlib.suppress(OSError):
        left = sorted(path for path in parent.iterdir() if path.name.startswith(PREFIX))
    for path in left:
        with contextlib.suppress(OSError):
            _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    """OSError where it is none of ours, or its owner lives."""
    folder = _opened(path)
    try:
        # A pipe of that name would be waited for without O_NONBLOCK.
        lock = os.open(LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            if _ours(folder) and _ours(lock) and stat.S_ISREG(os.fstat(lock).st_mode):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_nlink:  # else another one has just swept here
                    _remove(path, folder)
        finally:
            os.close(lock)
    finally:
        os.close(folder)


def _opened(path: Path) -> int:
    """OSError for what is no folder, and for a link to one."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _ours(descriptor: int) -> bool:
    return os.fstat(descriptor).st_uid == os.geteuid()


def _remove(path: Path, folder: int) -> None:
    """All that can be; the file that is locked goes last, so that a later process ends what is interrupted here. Links
    are removed, not followed. OSError where something stays."""
    for name in os.listdir(folder):
        if name == LOCK:
            continue
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, ignore_errors=True, dir_fd=folder)
        else:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
    if set(os.listdir(folder)) <= {LOCK}:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(LOCK, dir_fd=folder)
        path.rmdir()
