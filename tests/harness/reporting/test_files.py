"""A report is replaced as a whole or not at all."""

import os
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from harness.reporting import write_atomically


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_writes_the_bytes_given_and_makes_the_folders(tmp_path: Path) -> None:
    path = tmp_path / "reports" / "families" / "a.md"
    write_atomically(path, "one\ntwo \u00e9\n")
    assert path.read_bytes() == b"one\ntwo \xc3\xa9\n"
    write_atomically(path, "")
    assert path.read_bytes() == b""
    assert names(path.parent) == ["a.md"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=repr)
@pytest.mark.parametrize("where", ["replace", "fsync"])
def test_a_failure_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: BaseException
) -> None:
    path = tmp_path / "a.json"
    write_atomically(path, "old")

    def fail(*_: Any, **__: Any) -> None:
        assert len(names(tmp_path)) == 2  # it failed where there is something to clean up
        raise error

    monkeypatch.setattr(os, where, fail)
    with pytest.raises(type(error)) as raised:
        write_atomically(path, "new")
    assert raised.value is error
    assert names(tmp_path) == ["a.json"]
    assert path.read_text() == "old"


def test_it_syncs_before_it_replaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def act(*arguments: Any) -> None:
            done.append(name)
            real(*arguments)

        monkeypatch.setattr(os, name, act)

    spy("fsync")
    spy("replace")
    write_atomically(tmp_path / "a", "text")
    assert done == ["fsync", "replace"]


def test_text_that_has_no_utf8_touches_nothing(tmp_path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_atomically(tmp_path / "new" / "a", "\ud800")
    assert names(tmp_path) == []


def test_an_error_of_the_file_system_passes_through(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="folder"):
        write_atomically(tmp_path / "folder", "text")
    with pytest.raises(OSError, match="file"):
        write_atomically(tmp_path / "file" / "a", "text")
    assert names(tmp_path) == ["file", "folder"]


@pytest.mark.skipif(os.name != "posix", reason="permission bits")
def test_others_may_read_it_as_far_as_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        write_atomically(tmp_path / "a", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o644


def test_readers_see_one_text_or_the_other(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    texts = {"a" * 400_000, "b" * 300_000}
    write_atomically(path, min(texts))
    done, seen, wrong = threading.Event(), set[str](), list[object]()

    def read() -> None:
        while not done.is_set():
            try:
                text = path.read_text()
            except OSError as error:  # a moment without the file is as wrong as half of it
                wrong.append(error)
                return
            (seen.add if text in texts else wrong.append)(text)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    end, rounds = time.monotonic() + 20, 0
    while not wrong and time.monotonic() < end and (rounds < 30 or seen != texts):
        for text in sorted(texts):
            write_atomically(path, text)
        rounds += 1
    done.set()
    for reader in readers:
        reader.join()
    assert not wrong
    assert seen == texts  # otherwise no reader ran beside a writer, and this showed nothing


def test_writers_at_once_leave_one_whole_text(tmp_path: Path) -> None:
    path = tmp_path / "a.md"
    texts = [letter * 200_000 for letter in "abcd"]
    writers = [threading.Thread(target=write_atomically, args=(path, text)) for text in texts]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert path.read_text() in texts
    assert names(tmp_path) == ["a.md"]
