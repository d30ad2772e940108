"""Small checkpoints, written once per worker, and the command that validates them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from harness.checkpoints import synthesise
from harness.cli import main

Synth = Callable[..., Path]
SMALL = ("--max-kv-size", "16", "--prefill-chunk-size", "8", "--tokens", "40", "--decode", "2")
"""Decisive from the fourth chunk on, and cheap."""
ROOT = Path(__file__).parents[2]
needs_mlx_lm = pytest.mark.skipif(
    find_spec("mlx_lm") is None,
    reason="mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'",
)


@dataclass(frozen=True)
class Validated:
    """Exit code, both streams, and the record and the report if there are any."""

    code: int
    out: str
    err: str
    record: dict[str, Any] | None
    markdown: str | None

    def row(self, criterion: str) -> dict[str, Any]:
        assert self.record is not None
        return next(row for row in self.record["acceptance"] if row["criterion"] == criterion)


Validate = Callable[..., Validated]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "digest-cache"))


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # workers find the package


@pytest.fixture(scope="session")
def synth(tmp_path_factory: pytest.TempPathFactory) -> Synth:
    """``synth(family, **options)`` -> folder; the same one for the same arguments, so do not write into it."""
    made: dict[str, Path] = {}

    def make(family: str, **options: object) -> Path:
        key = f"{family} {sorted(options.items())}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("synth") / "checkpoint"
            synthesise(family, made[key], **options)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.fixture
def validate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Validate:
    """``validate(folder, *options)`` in this process, with SMALL numbers unless others are given."""

    def run(folder: Path, *options: str) -> Validated:
        out = tmp_path / "reports"
        before = _times(out)
        code = main(["validate", str(folder), *SMALL, *options, "--out", str(out)])
        said = capsys.readouterr()
        after = _times(out)
        (record,) = [path for path in after if before.get(path) != after[path]] or [None]
        data = None if record is None else json.loads(record.read_text())
        markdown = None if record is None else record.with_suffix(".md").read_text()
        return Validated(code, said.out, said.err, data, markdown)

    return run


def _times(out: Path) -> dict[Path, int]:
    """When each record was written."""
    return {path: path.stat().st_mtime_ns for path in (out / "checkpoints").glob("*.json")}
