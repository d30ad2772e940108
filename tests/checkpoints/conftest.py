"""Checkpoints that several tests read, written once per worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoints import synthesise

Synth = Callable[..., Path]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Digests are kept in the test's own directory, not in the user's."""
    monkeypatch.setenv("KV_HARNESS_CACHE", str(tmp_path / "digest-cache"))


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
