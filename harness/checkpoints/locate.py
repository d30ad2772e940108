"""A directory, or the id of a repository on the hub: existing path first, then the local hub cache, then the network.

``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` mean what they mean to huggingface_hub, which is only imported for
a download.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoints.errors import CheckpointError

_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$")
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]  # never code


@dataclass(frozen=True)
class Location:
    """Where the files are, and the name that the checkpoint goes by: its folder's or its repository's."""

    path: Path
    name: str


def locate(where: str, revision: str = "main") -> Location:
    """Find a checkpoint. CheckpointError when there is neither such a path nor such a repository."""
    path = Path(where).expanduser()
    if path.is_dir():
        return Location(path, path.resolve().name)
    if path.exists():
        raise CheckpointError(f"{path}: is not a directory; name the directory that holds config.json")
    if not _ID.match(where) or ".." in where:
        raise CheckpointError(f"{where}: no such directory, and not the id of a repository (owner/name)")
    if cached := _cached(where, revision):
        return Location(cached, where)
    if _truthy("HF_HUB_OFFLINE"):
        raise CheckpointError(f"{where}: no such directory, not in {hub_cache()}, and HF_HUB_OFFLINE is set")
    return Location(_download(where, revision), where)


def hub_cache() -> Path:
    """The hub's cache directory, as huggingface_hub chooses it."""
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return Path(explicit).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def _cached(repository: str, revision: str) -> Path | None:
    """The snapshot of a revision (a name or a commit) in the cache, if it has a config and weights."""
    base = hub_cache() / ("models--" + repository.replace("/", "--"))
    try:
        commit = (base / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    folder = base / "snapshots" / commit
    if not (folder / "config.json").exists():
        return None
    return folder if any(folder.glob("*.safetensors")) else None


def _truthy(variable: str) -> bool:
    return os.environ.get(variable, "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _download(repository: str, revision: str) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{repository}: no such directory and not in {hub_cache()}; to download it: pip install huggingface_hub"
        ) from error
    try:
        found = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS)
    except Exception as error:  # of the network, the hub, or its library; all mean that there is no checkpoint
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"{repository}: no such directory, and cannot be downloaded: {reason:.300}") from error
    return Path(found)
