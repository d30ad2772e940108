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


@pytest.mark.parametrize("failure", ALL, ids=lambda failure: f"{failure.library}-{failure.id}")
def test_a_record_is_whole(failure: records.KnownFailure) -> None:
    assert failure.fails in BY_ID
    assert failure.title and failure.program and failure.evidence.strip() and failure.versions and failure.families
    assert set(failure.also) <= set(BY_ID) - {failure.fails} and len(set(failure.also)) == len(failure.also)
    assert failure.operations or failure.caches or not failure.also  # or it would excuse whatever that property finds
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


@pytest.mark.parametrize("failure", ALL, ids=lambda failure: f"{failure.library}-{failure.id}")
def test_the_reproduction_shows_it(failure: records.KnownFailure) -> None:
    version = _installed(failure.library)
    if version not in failure.versions:
        pytest.skip(f"{failure.library} {version} is not among {', '.join(failure.versions)}")
    ran = subprocess.run([sys.executable, failure.reproduction], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1, ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1 and "Traceback" not in ran.stderr


def test_what_is_wrong_and_no_record_is_out_of_reach() -> None:
    """See the README beside the records. ConcatenateKVCache forgets a trim, and no module but afm7 uses it, which keeps
    the one that it makes to itself."""
    mlx_lm = pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    import mlx.core as mx
    from mlx_lm.models.cache import ConcatenateKVCache, trim_prompt_cache

    if mlx_lm.__version__ != "0.32.2":
        pytest.skip(f"looked at in mlx-lm 0.32.2, not in {mlx_lm.__version__}")
    cache = ConcatenateKVCache()
    cache.update_and_fetch(mx.ones((1, 1, 4, 2)), mx.ones((1, 1, 4, 2)))
    assert cache.is_trimmable() and trim_prompt_cache([cache], 2) == 2 and cache.offset == 2
    keys, _ = cache.update_and_fetch(mx.zeros((1, 1, 1, 2)), mx.zeros((1, 1, 1, 2)))
    assert (keys.shape[2], cache.offset) == (5, 5), "the trim is remembered: take it out of the README"
    folder = Path(mlx_lm.__file__).parent
    users = [path.name for path in folder.rglob("*.py") if "ConcatenateKVCache" in path.read_text()]
    assert sorted(users) == ["afm7.py", "cache.py"]
    from harness.targets import mlx_lm as target

    for one in target.resolve("mlx_lm:afm7"):
        assert not [cache for cache in one.fresh_caches if isinstance(cache, ConcatenateKVCache)]


def test_a_record_with_a_field_too_many_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd.toml").write_text('title = "x"\nmore = 1\n')
    monkeypatch.setattr(records, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"odd\.toml: the field evidence is missing"):
        records.known_failures()
