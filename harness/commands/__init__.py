"""Groups of commands, one module each, what their options share, and the error of input that cannot be used."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

MOST_JOBS = 512


class UsageError(Exception):
    """Input that cannot be used; the message is one line."""


def jobs_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--jobs``; the namespace then holds a number, at least 1."""
    parser.add_argument(
        "--jobs", type=_jobs, default=1, metavar="N|auto", help="processes at once; auto: one a processor (default: 1)"
    )


def out_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``; the namespace then holds the folder of reports."""
    parser.add_argument("--out", type=folder, default=Path("reports"), metavar="DIR", help="default: reports")


def limit_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--limit``; the namespace then holds a number of seconds."""
    parser.add_argument(
        "--limit",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="how long an engine in another process may take for an answer before it counts as hung; five times that "
        "for its start (default: 60)",
    )


def file_to_write(text: str) -> Path:
    """The type of an option that names a file to write; refused before anything is done where there can be none."""
    path = Path(text)
    if not text.strip():
        raise argparse.ArgumentTypeError("names no file")
    try:
        path.resolve()
        if (path.exists() or path.name in ("", "..")) and not path.is_file():
            raise argparse.ArgumentTypeError(f"{text}: not a regular file")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text}: no such folder as {path.parent}")
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, a link to itself, a null byte
        raise argparse.ArgumentTypeError(f"{text!r:.200}: {getattr(error, 'strerror', None) or error}") from error
    return path


def folder(text: str) -> Path:
    """The type of an option that names a folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("names no folder (for this one, say .)")
    return Path(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError(f"must lie in (0, 86400] seconds, got {text!r:.40}")
    return seconds


def _jobs(text: str) -> int:
    if text == "auto":
        from harness.workers import processors

        return processors()
    if not (text.isascii() and text.isdecimal()) or not 1 <= int(text) <= MOST_JOBS:
        raise argparse.ArgumentTypeError(f"must be auto or lie in [1, {MOST_JOBS}], got {text!r:.40}")
    return int(text)


def reference_targets(device: str | None = None) -> Any:
    """The reference target, on ``device`` if one is named; MLX is only loaded when a command needs it."""
    try:
        from harness.targets import reference
    except ImportError as error:
        raise UsageError(f"MLX cannot be loaded ({error}); on Linux install 'mlx[cpu]', on macOS 'mlx'") from error
    if device is not None:
        try:
            reference.use_device(device)
        except reference.TargetError as error:
            raise UsageError(f"argument --device: {error}") from error
    return reference
