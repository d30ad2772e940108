"""The files of a checkpoint of any model type: config, weight headers and index, checked; no family is asked for."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoints.errors import CheckpointError, read_json
from harness.checkpoints.weights import Weights, inside, read_weights


@dataclass(frozen=True)
class Files:
    """``config``: of config.json, ``config_bytes`` the file itself; ``weights``: unread."""

    path: Path
    config: dict[str, Any]
    config_bytes: bytes
    weights: Weights

    @property
    def config_path(self) -> Path:
        """The config.json."""
        return self.path / "config.json"

    @property
    def dtypes(self) -> dict[str, int]:
        """Tensors of each type, the most frequent first."""
        return dict(Counter(tensor.dtype for tensor in self.weights.tensors.values()).most_common())


def read_config(folder: Path) -> tuple[Any, bytes]:
    """The value of a folder's config.json, and its bytes. CheckpointError names the file."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        raise CheckpointError(f"{path}: missing; a checkpoint is a directory with config.json and .safetensors")
    return read_json(inside(folder, path.name, folder))


def open_files(folder: Path) -> Files:
    """Check that a folder holds a config with a model type, and all its weight files whole. CheckpointError names file
    and key."""
    config, raw = read_config(folder)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{folder / 'config.json'}: model_type is missing, or not a text")
    return Files(folder, config, raw, read_weights(folder))
