"""A virtual environment for every release, made once and used again.

Nothing of the harness is installed there: a ``.pth`` file adds this checkout behind the environment's own packages, so
that the worker runs our code on the release, on its MLX and NumPy.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

MARK = ".kv-harness"
"""Says that a folder is ours to clear."""
STAMP = ".installed"
"""Made last; holds what was installed."""
_SOURCE = Path(__file__).resolve().parents[2]


class NoEnvironment(Exception):
    """An environment that cannot be made; the message is one line."""


def environment(folder: Path, installs: Sequence[Sequence[str]]) -> Path:
    """The interpreter of the environment in ``folder``, which is made where it is not whole yet, by these ``pip
    install`` commands. Raises NoEnvironment."""
    folder = folder.absolute()
    python = folder / "bin" / "python"
    lines = (argument for arguments in installs for argument in arguments)
    wanted = "\n".join((f"python {sys.version_info[0]}.{sys.version_info[1]}", *lines, ""))
    try:
        if not (folder / STAMP).is_file() or (folder / STAMP).read_text(encoding="utf-8") != wanted:
            _make(folder, python, installs)
        paths = {"base": str(folder), "platbase": str(folder)}
        packages = Path(sysconfig.get_path("purelib", "venv", paths))
        (packages / "kv_harness.pth").write_text(f"{_SOURCE}\n", encoding="utf-8")
        (folder / STAMP).write_text(wanted, encoding="utf-8")
    except OSError as error:
        raise NoEnvironment(f"cannot make an environment in {folder}: {error.strerror or error}") from error
    return python


def _make(folder: Path, python: Path, installs: Sequence[Sequence[str]]) -> None:
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARK).is_file():
            raise NoEnvironment(f"cannot make an environment in {folder}: it holds what is not ours")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    _run([sys.executable, "-m", "venv", str(folder)], "make an environment")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    for arguments in installs:
        _run([*pip, *arguments], f"install {next(each for each in arguments if not each.startswith('-'))}")


def _run(command: list[str], what: str) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines or ["it said nothing"]
        raise NoEnvironment(f"cannot {what}: {errors[-1]:.200}")
