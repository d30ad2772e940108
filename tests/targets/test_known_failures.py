"""Known failures: every record is whole, and every reproduction shows its bug in the release in which it was seen."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from harness import known_failures as records
from properties import BY_ID

ALL = records.known_failures()


def _installed(library: str) -> str | None:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def test_there_are_some() -> None:
    assert len(ALL) >= 7 and len({each.id for each in ALL}) == len(ALL)


@pytest.mark.parametrize("failure", ALL, ids=lambda failure: failure.id)
def test_a_record_is_whole(failure: records.KnownFailure) -> None:
    assert failure.fails in BY_ID
    assert failure.title and failure.program and failure.evidence.strip() and failure.versions and failure.families
    assert failure.upstream == "" or failure.upstream.startswith("https://")
    source = failure.reproduction.read_text()
    imports = {
        alias.name.split(".")[0] if isinstance(node, ast.Import) else (node.module or "").split(".")[0]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert imports <= {"importlib", "mlx", failure.library.replace("-", "_")}
    assert len(source.splitlines()) <= 25


@pytest.mark.parametrize("failure", ALL, ids=lambda failure: failure.id)
def test_the_reproduction_shows_it(failure: records.KnownFailure) -> None:
    version = _installed(failure.library)
    if version not in failure.versions:
        pytest.skip(f"{failure.library} {version} is not among {', '.join(failure.versions)}")
    ran = subprocess.run([sys.executable, failure.reproduction], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1, ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1 and "Traceback" not in ran.stderr


def test_a_record_with_a_field_too_many_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.toml").write_text('title = "x"\nmore = 1\n')
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"odd\.toml: the field evidence is missing"):
        records.known_failures()
