"""Commands of workers, and what must be gone behind a test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers find the package, wherever the tests run."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Temporary files are made here, and nothing of a worker is left of them."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield folder
    assert [path.name for path in folder.iterdir() if path.name.startswith("kv-harness")] == []


@pytest.fixture(scope="session")
def toy() -> str:
    return f"{sys.executable} -m harness.wire.examples.toy"


@pytest.fixture(scope="session")
def misbehaving() -> Callable[[str, str], str]:
    """The command of a worker that misbehaves in a mode, when something is asked."""
    return lambda mode, when: f"{sys.executable} {Path(__file__).parent / 'misbehaving.py'} {mode} {when}"


@pytest.fixture(scope="session")
def gone() -> Callable[[int], bool]:
    """Is a process gone, within two seconds?"""

    def is_gone(pid: int) -> bool:
        for _ in range(100):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            if Path(f"/proc/{pid}/stat").exists() and " Z " in Path(f"/proc/{pid}/stat").read_text():
                return True  # dead, and nobody in this container reaps orphans
            time.sleep(0.02)
        return False

    return is_gone
