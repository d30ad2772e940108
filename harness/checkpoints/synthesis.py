"""Checkpoints made up on the spot, in either layout, with everything that other loaders look for.

Weights are drawn tensor by tensor and written shard by shard: memory is that of one shard.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from harness.checkpoints.errors import CheckpointError
from harness.checkpoints.loading import DTYPES
from harness.checkpoints.tokenizer import generation_config, tokenizer_files
from harness.checkpoints.weights import INDEX
from reference_models.hf.layouts import LAYOUTS, config_to_json, default_layout, pack, weights_in
from reference_models.hf.processors import processor_files
from reference_models.hf.sizes import SIZES
from reference_models.quantised import BITS, Packing
from reference_models.registry import variants
from reference_models.weights import draw

SHARD_BYTES = 5 << 30
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")


def synthesise(
    family: str,
    folder: Path,
    *,
    bits: int | None = None,
    seed: int = 0,
    layout: str | None = None,
    sizes: str = "tiny",
    dtype: str | None = None,
    config: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a checkpoint of ``family`` with the random weights of ``seed`` into a new or empty folder.

    ``bits``: packed by MLX, which only its own layout has. ``sizes``: tiny, or published (few layers). ``dtype``:
    float32 for tiny ones, bfloat16 for published ones. ``config`` replaces ``sizes``. Raises CheckpointError, and
    UnknownFamily with the nearest names.
    """
    variants(family)  # raises for an unknown one
    chosen = layout or ("mlx" if bits is not None else default_layout(family))
    if chosen not in LAYOUTS:
        raise CheckpointError(f"layout is one of {', '.join(LAYOUTS)}, not {chosen!r:.40}")
    if bits is not None and bits not in BITS:
        raise CheckpointError(f"bits is one of {', '.join(map(str, BITS))}, not {bits!r:.40}")
    if bits is not None and chosen != "mlx":
        raise CheckpointError(f"quantised weights (bits {bits}) exist in the mlx layout only")
    if sizes not in SIZES:
        raise CheckpointError(f"sizes is one of {', '.join(SIZES)}, not {sizes!r:.40}")
    dtype = dtype or ("float32" if sizes == "tiny" else "bfloat16")
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r:.40}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder}: exists and is not an empty directory")
    config = config if config is not None else SIZES[sizes][family]()
    packing = None if bits is None else Packing(bits, 32 if sizes == "tiny" else 64)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(family, folder, config, chosen, seed, dtype, packing, shard_bytes)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from error


def _write(
    family: str,
    folder: Path,
    config: Any,
    layout: Any,
    seed: int,
    dtype: str,
    packing: Packing | None,
    shard_bytes: int,
) -> None:
    said: dict[str, Any] = {}
    placed: dict[str, int] = {}
    shard: dict[str, mx.array] = {}
    count = total = held = 0
    for weights in _layers(family, config, seed):
        made = {name: array.astype(DTYPES[dtype]) for name, array in weights.items()}
        made = weights_in(layout, family, config, made)
        if packing is not None:
            made, more = pack(made, packing)
            said |= more
        size = sum(array.nbytes for array in made.values())
        if shard and held + size > shard_bytes:
            count, shard, held = _flush(folder, count, shard, placed), {}, 0
        shard |= made
        held, total = held + size, total + size
    count = _flush(folder, count, shard, placed)
    names = _name_shards(folder, count)
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": {key: names[n] for key, n in sorted(placed.items())}}
        _write_json(folder / INDEX, index)
    data = config_to_json(family, config, dtype)
    if said:
        data |= {"quantization": said, "quantization_config": said}
    _write_json(folder / "config.json", data)
    _write_json(folder / "generation_config.json", generation_config())
    words = tokenizer_files(config.vocab_size)
    for name, content in (words | processor_files(family, config) if words else {}).items():
        if isinstance(content, str):
            (folder / name).write_text(content)
        else:
            _write_json(folder / name, content)


def _layers(family: str, config: Any, seed: int) -> Iterator[dict[str, mx.array]]:
    """Our parameters, one layer (or what stands outside of the layers) at a time; drawn when they are evaluated."""
    model = importlib.import_module(f"reference_models.{family}").Model(config)
    groups: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, array in cast(list[tuple[str, mx.array]], tree_flatten(model.parameters())):
        match = _LAYER.match(name)
        groups.setdefault(match[1] if match else name.split(".")[0], []).append((name, tuple(array.shape)))
    for parameters in groups.values():
        yield {name: draw(name, shape, seed) for name, shape in parameters}


def _flush(folder: Path, number: int, shard: dict[str, mx.array], placed: dict[str, int]) -> int:
    mx.save_safetensors(str(folder / f"part-{number}.safetensors"), shard, metadata={"format": "pt"})
    placed |= dict.fromkeys(shard, number)
    return number + 1


def _name_shards(folder: Path, count: int) -> list[str]:
    """The parts under the names that loaders expect, now that their number is known."""
    names = [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    names = names if count > 1 else ["model.safetensors"]
    for number, name in enumerate(names):
        (folder / f"part-{number}.safetensors").rename(folder / name)
    return names


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2, ensure_ascii=True) + "\n")
