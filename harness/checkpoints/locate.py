"""A directory, or the id of a repository on the hub: existing path first, then the local hub cache, if it
holds all of the repository, then the network.

``HF_HOME``, ``HF_HUB_CACHE`` and ``HF_HUB_OFFLINE`` mean what they mean to huggingface_hub, which is only imported for
a download.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.weights import missing_file

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
    cached = _cached(where, revision)
    missing = f"not in {hub_cache()}"
    if cached is not None:
        file = _missing(cached)
        if file is None:
            return Location(cached, where)
        missing = f"incomplete in the hub's cache ({cached / file} is missing)"
    if _truthy("HF_HUB_OFFLINE"):
        raise CheckpointError(f"{where}: no such directory, {missing}, and HF_HUB_OFFLINE is set")
    return Location(_download(where, revision, missing), where)


def hub_cache() -> Path:
    """The hub's cache directory, as huggingface_hub chooses it."""
    if explicit := os.environ.get("HF_HUB_CACHE"):
        return Path(explicit).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "huggingface" / "hub"


def _cached(repository: str, revision: str) -> Path | None:
    """The snapshot of a revision (a name or a commit) in the cache, whole or not."""
    base = hub_cache() / ("models--" + repository.replace("/", "--"))
    try:
        commit = (base / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    folder = base / "snapshots" / commit
    return folder if folder.is_dir() else None


def _missing(folder: Path) -> str | None:
    """A file that an interrupted download or a lost blob left out of a snapshot; None when it is whole."""
    if not (folder / "config.json").exists():
        return "config.json"
    lost = (path.name for pattern in _PATTERNS for path in folder.glob(pattern) if not path.exists())
    return min(lost, default=None) or missing_file(folder)


def _truthy(variable: str) -> bool:
    return os.environ.get(variable, "").strip().upper() in {"1", "ON", "YES", "TRUE"}


def _download(repository: str, revision: str, missing: str) -> Path:
    """What the cache lacks, through the hub's client, which resumes. ``missing``: why, for an error."""
    try:
        import huggingface_hub
    except ImportError as error:
        raise CheckpointError(
            f"{repository}: no such directory, {missing}; to download it: pip install huggingface_hub"
        ) from error
    try:
        found = huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=_PATTERNS)
    except Exception as error:  # of the network, the hub, or its library; all mean that there is no checkpoint
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(
            f"{repository}: no such directory, {missing}, and cannot be downloaded: {reason:.300}"
        ) from error
    return Path(found)
