"""Where a hub id is found: the local cache if it is whole, else the network."""

from __future__ import annotations

import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.checkpoints import CheckpointError, check, load_model, open_checkpoint
from tests.checkpoints.conftest import Synth


def _as_hub(folder: Path, hub: Path, repository: str) -> Path:
    """The folder in the form of the hub's cache: blobs, and a snapshot of links."""
    base = hub / ("models--" + repository.replace("/", "--"))
    snapshot = base / "snapshots" / "c0ffee"
    snapshot.mkdir(parents=True)
    (base / "blobs").mkdir()
    (base / "refs").mkdir()
    (base / "refs" / "main").write_text("c0ffee")
    for number, path in enumerate(folder.iterdir()):
        shutil.copy(path, base / "blobs" / str(number))
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize("sharded", [False, True])
def test_the_hub_cache_is_found_before_the_network(
    sharded: bool, synth: Synth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = synth("qwen3_vl", shard_bytes=60_000 if sharded else 1 << 30)
    snapshot = _as_hub(folder, tmp_path / "home" / "hub", "some/model")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint("some/model")
    assert checkpoint.path == snapshot and checkpoint.name == "some/model"
    load_model(checkpoint)
    assert open_checkpoint("some/model", revision="c0ffee").path == snapshot
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        open_checkpoint("some/other")
    shutil.copytree(synth("mistral4"), tmp_path / "some" / "model")
    assert open_checkpoint("some/model").family == "mistral4"  # an existing path comes first


def _lose_blob(snapshot: Path, name: str) -> None:
    (snapshot / name).resolve().unlink()


def _lose_link(snapshot: Path, name: str) -> None:
    (snapshot / name).unlink()


@pytest.mark.parametrize("lose", [_lose_blob, _lose_link])
@pytest.mark.parametrize(
    ("file", "sharded"),
    [
        ("config.json", True),
        ("model-00002", True),
        ("model.safetensors.index.json", True),
        ("model.safetensors", False),
        ("tokenizer.json", False),
    ],
)
def test_a_hub_cache_with_holes_is_not_a_checkpoint(
    lose: Callable[[Path, str], None],
    file: str,
    sharded: bool,
    synth: Synth,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = synth("qwen3_vl", shard_bytes=60_000 if sharded else 1 << 30)
    snapshot = _as_hub(folder, tmp_path / "hub", "some/model")
    name = next(path.name for path in sorted(snapshot.iterdir()) if path.name.startswith(file))
    lose(snapshot, name)
    if file == "model.safetensors.index.json" and lose is _lose_link:
        lose(snapshot, name := sorted(path.name for path in snapshot.glob("*.safetensors"))[2])
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    whole = file == "tokenizer.json" and lose is _lose_link  # nothing says that a checkpoint has one
    if whole:
        assert open_checkpoint("some/model").path == snapshot
        return
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint("some/model")
    said = str(caught.value)
    assert f"some/model: no such directory, incomplete in the hub's cache ({snapshot / name} is missing)" in said
    assert "HF_HUB_OFFLINE is set" in said and "\n" not in said

    def snapshot_download(repository: str, **options: object) -> str:
        (snapshot / name).unlink(missing_ok=True)
        shutil.copy(folder / name, snapshot / name)
        return str(snapshot)

    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    check(open_checkpoint("some/model"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check(open_checkpoint("some/model"))


def test_downloads_go_through_the_hubs_client(synth: Synth, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    asked = []

    def snapshot_download(repository: str, **options: object) -> str:
        asked.append((repository, options["revision"], options["allow_patterns"]))
        if repository == "some/broken":
            raise OSError("no route\nto host")
        return str(synth("qwen3_vl"))

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert open_checkpoint("some/model").name == "some/model"
    assert asked[0][:2] == ("some/model", "main") and not any("py" in pattern for pattern in asked[0][2])  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError, match=r"some/broken: .*not in .*cannot be downloaded: no route to host"):
        open_checkpoint("some/broken")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub"):
        open_checkpoint("some/model")
