"""What a killed process left is removed by a later one; what lives, what is another's, and what is no folder stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import scratch

HOLDS = (
    "import sys; from harness import scratch; folder = scratch.make('kv-harness-wire-'); "
    "(folder.path / 'weights').touch(); print(folder.path, flush=True); sys.stdin.read()"
)


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(scratch, "_swept", set())
    return tmp_path


@pytest.fixture
def owner() -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process with a folder, and the folder."""
    command = [sys.executable, "-c", HOLDS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def left(parent: Path, name: str = "kv-harness-wire-left") -> Path:
    """As a killed process leaves one."""
    folder = parent / name
    folder.mkdir()
    (folder / scratch.LOCK).touch()
    return folder


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_the_folder_of_a_killed_process_is_removed_by_the_next_one(
    owner: tuple[subprocess.Popen[str], Path], temporary: Path
) -> None:
    process, folder = owner
    assert folder.parent == temporary and (folder / "weights").exists()
    process.kill()
    process.wait()
    assert folder.is_dir()  # nobody else was there to remove it
    with scratch.make() as mine:
        assert names(temporary) == [mine.name]
    assert names(temporary) == []


def test_the_folder_of_a_process_that_lives_stays(owner: tuple[subprocess.Popen[str], Path], temporary: Path) -> None:
    _, folder = owner
    with scratch.make() as mine:
        scratch.sweep(temporary)
        assert names(temporary) == sorted([mine.name, folder.name]) and (folder / "weights").exists()


def test_a_process_that_a_killed_one_has_started_does_not_hold_its_lock(temporary: Path) -> None:
    starts = "import subprocess; child = subprocess.Popen(['sleep', '60'], stdout=-3); print(child.pid, end=' '); "
    command = [sys.executable, "-c", HOLDS.replace("print(", f"{starts}print(")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child, folder = process.stdout.readline().split()
        process.kill()
    try:
        scratch.sweep(temporary)
        assert not Path(folder).exists()
    finally:
        os.kill(int(child), 9)


def test_what_is_no_folder_that_was_left_stays(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    left(elsewhere)
    (temporary / "kv-harness-wire-link").symlink_to(elsewhere / "kv-harness-wire-left")
    (temporary / "kv-harness-wire-file").write_text("mine")
    (temporary / "kv-harness-wire-foreign").mkdir()
    (temporary / "kv-harness-wire-foreign" / "notes").touch()
    left(temporary, "other-harness-left")
    for name, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):  # in the place of the lock
        (temporary / f"kv-harness-wire-{name}").mkdir()
        make(temporary / f"kv-harness-wire-{name}" / scratch.LOCK)
    linked = temporary / "kv-harness-wire-linked-lock"
    linked.mkdir()
    (linked / scratch.LOCK).symlink_to(elsewhere / "kv-harness-wire-left" / scratch.LOCK)
    before = names(temporary)
    gone = left(temporary)
    scratch.sweep(temporary)
    assert names(temporary) == before and not gone.exists()
    assert names(elsewhere) == ["kv-harness-wire-left"]


def test_links_in_what_was_left_are_not_followed(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "notes").touch()
    folder = left(temporary)
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(elsewhere)
    (folder / "sub" / "link").symlink_to(elsewhere / "deep")
    scratch.sweep(temporary)
    assert names(temporary) == ["elsewhere"] and (elsewhere / "deep" / "notes").exists()


def test_the_folder_of_another_user_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(temporary)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        scratch.sweep(temporary)
        assert folder.is_dir()
    scratch.sweep(temporary)
    assert not folder.exists()


def test_what_cannot_be_removed_is_tried_again_later(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = left(temporary)
    (folder / "busy").touch()
    with monkeypatch.context() as broken:
        broken.setattr(os, "unlink", lambda *_, **__: (_ for _ in ()).throw(PermissionError("busy")))
        scratch.sweep(temporary)
        assert names(folder) == ["busy", scratch.LOCK]
    scratch.sweep(temporary)
    assert not folder.exists()


def test_a_folder_that_is_swept_while_it_is_made_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the file and its lock, where another process may take it for left behind."""
    flock, made = scratch.fcntl.flock, []

    def late(lock: int, how: int) -> None:
        if not made:
            made.append(lock)
            scratch.sweep(temporary)  # which locks, through here, and removes
        flock(lock, how)

    monkeypatch.setattr(scratch.fcntl, "flock", late)
    with scratch.make() as mine:
        assert mine.is_dir() and names(temporary) == [mine.name] and len(made) == 1


def test_without_locks_a_folder_is_nobodys_to_sweep(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as without:
        without.setattr(scratch.fcntl, "flock", none)
        folder = scratch.make()
    scratch.sweep(temporary)
    assert folder.path.is_dir()
    folder.remove()
    assert names(temporary) == []
