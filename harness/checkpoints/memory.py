"""How much memory a checkpoint takes once it is loaded, and how much the machine has. Reads no weight."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from harness.checkpoints.checkpoint import Checkpoint
from harness.checkpoints.loading import DTYPES, skeleton
from harness.checkpoints.plan import plan
from reference_models.quantised import stays_packed

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4}


@dataclass(frozen=True)
class Footprint:
    """In bytes: ``weights`` as they will lie in memory, the cached rows of one ``token`` in all layers, in float32."""

    weights: int
    token: int


def footprint(checkpoint: Checkpoint, dtype: str | None = None) -> Footprint:
    """Of the checkpoint loaded in ``dtype`` (as ``load_model`` takes it). CheckpointError as there."""
    model = skeleton(checkpoint)
    size = None if dtype is None else DTYPES[dtype].size
    weights = 0
    for assignment in plan(checkpoint, model):
        whole, *_ = assignment.sources
        *path, name = assignment.parameter.split(".")
        owner: Any = model
        for step in path:
            owner = owner[int(step)] if isinstance(owner, list) else owner[step]
        if whole.packing and assignment.recipe.whole and stays_packed(owner, name, ".".join(path)):
            packed, *others = whole.tensors
            weights += packed.bytes + sum(math.prod(t.shape) * (size or _BYTES[t.dtype]) for t in others)
        else:
            weights += math.prod(owner[name].shape) * (size or _BYTES[whole.tensors[-1].dtype])
    caches = model.make_caches()
    model(mx.array([[0]]), caches)  # lazy: shapes alone, nothing of it is computed
    return Footprint(weights, sum(cache.bytes_per_slot for cache in caches))


def free_bytes() -> int:
    """What this machine can give without swapping; where it does not say, all that it has."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    if found:
        return int(found[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
