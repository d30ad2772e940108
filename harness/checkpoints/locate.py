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

from harness.checkpoints.errors import CheckpointError, exists, read_bytes
from harness.checkpoints.weights import missing_file

_ID = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+$")
#: One component of a path: a commit, or a branch that has no slash.
_COMMIT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
_MOST_REF_BYTES = 1024
_MOST_ID = 200
_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model"]  # never code


@dataclass(frozen=True)
class Location:
    """Where the files are, and the name that the checkpoint goes by: its folder's or its repository's."""

    path: Path
    name: str


def locate(where: str, revision: str = "main") -> Location:
    """Find a checkpoint. CheckpointError when there is neither such a path nor such a repository."""
    if not where:
        raise CheckpointError("the path of the checkpoint is empty; name a directory, or a repository (owner/name)")
    path = _expanded(where)
    if exists(path) and path.is_dir():
        return Location(path, path.resolve().name)
    if exists(path):
        raise CheckpointError(f"{path}: is not a directory; name the directory that holds config.json")
    if not _ID.match(where) or ".." in where or len(where) > _MOST_ID:
        shown = where if len(where) <= _MOST_ID else f"{where[:_MOST_ID]}..."
        raise CheckpointError(f"{shown}: no such directory, and not the id of a repository (owner/name)")
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
        return _expanded(explicit)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    return _expanded(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "huggingface" / "hub"


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:  # no such user, or no home directory
        raise CheckpointError(f"{path:.200}: {error}; write the directory without ~") from error


def _cached(repository: str, revision: str) -> Path | None:
    """The snapshot of a revision (a name or a commit) in the cache, whole or not. CheckpointError for a ref that does
    not hold a commit."""
    base = hub_cache() / ("models--" + repository.replace("/", "--"))
    ref, commit = base / "refs" / revision, revision
    if os.path.lexists(ref):
        commit = read_bytes(ref, _MOST_REF_BYTES).decode("utf-8", "replace").strip()
        if not _COMMIT.fullmatch(commit):
            raise CheckpointError(f"{ref}: holds {commit!r:.100}, which is no commit; remove it, to download it again")
    folder = base / "snapshots" / commit
    return folder if exists(folder) else None


def _missing(folder: Path) -> str | None:
    """A file that an interrupted download or a lost blob left out of a snapshot; None when it is whole."""
    if not exists(folder / "config.json"):
        return "config.json"
    lost = (path.name for pattern in _PATTERNS for path in folder.glob(pattern) if not exists(path))
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
