"""Checkpoints as mlx-lm loads them, and what must be known of a model before it can be judged: which cache an attention
call reads, and which window its layer has."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from harness.checkpoints import CheckpointError, fingerprint, open_files
from harness.checkpoints.contents import contents
from harness.probe import Probe
from harness.targets import mlx_lm_caches as held
from harness.targets.mlx_lm_catalogue import Family
from harness.targets.mlx_lm_models import UnknownFamily, library, named_by, variants, version
from harness.targets.naming import TargetError

FAR = 4096
"""A window that no program reaches: it hides nothing, so it need not be known of which layers it is."""


@dataclass(frozen=True)
class Checkpoint:
    """``path`` of the folder, and the ``fingerprint`` of what lies in it."""

    path: str
    fingerprint: str


@dataclass(frozen=True, eq=False)
class Loaded:
    """The model, float32 where it is not packed, and what is known of it. ``model_type``: its name in the catalogue."""

    model: Any
    model_type: str
    family: Family


def find(path: str) -> Checkpoint:
    """The checkpoint in a folder. Nothing of its weights is loaded.

    Raises TargetError, with one line: no such folder, a file is missing or cut off, or the catalogue has no such type.
    """
    try:
        folder = Path(path).expanduser().resolve()
        if not folder.is_dir():
            raise TargetError(f"{path:.200}: no such directory; a checkpoint is named by its folder")
        files = open_files(folder)
        variants(named_by(files.config["model_type"]))  # what it is, before hundreds of megabytes are read
        _only_what_is_loaded(folder, files.config, files.weights.files)
        contents(files)  # a config that calls weights quantised which are not, or the reverse
        return Checkpoint(str(folder), fingerprint(files).digest)
    except (CheckpointError, OSError, RuntimeError) as error:  # RuntimeError: no home directory
        raise TargetError(_one_line(error)) from error
    except UnknownFamily as error:
        raise TargetError(f"{path:.200}: {error}") from error


def _only_what_is_loaded(folder: Path, config: dict[str, Any], checked: Sequence[Path]) -> None:
    """TargetError unless the library will load the files that were checked, and run no code of the folder."""
    if config.get("model_file") is not None:
        raise TargetError(f"{folder / 'config.json'}: model_file names code of its own, which is not run")
    if odd := sorted({path.name for path in folder.glob("model*.safetensors")} ^ {path.name for path in checked}):
        raise TargetError(
            f"{folder / odd[0]}: mlx-lm loads all of model*.safetensors and nothing else, but this file is either not "
            "named so, or not one of this checkpoint"
        )


@functools.lru_cache(maxsize=2)
def load(checkpoint: Checkpoint) -> Loaded:
    """Its model, loaded by the library. TargetError, with one line; also where another checkpoint lies there now."""
    now = find(checkpoint.path)
    if now != checkpoint:
        raise TargetError(
            f"{checkpoint.path}: another checkpoint lies there (fingerprint {now.fingerprint:.12}..., not "
            f"{checkpoint.fingerprint:.12}...)"
        )
    library()  # NotInstalled
    files = open_files(Path(checkpoint.path))
    model_type = named_by(files.config["model_type"])
    try:
        found = importlib.import_module("mlx_lm.utils").load_model(Path(checkpoint.path))
        model = found[0] if isinstance(found, tuple) else found  # the model alone, in old releases
        model.set_dtype(mx.float32)  # tolerances are known for nothing else; scales and biases of packed weights too
        mx.eval(model.parameters())
    except Exception as error:  # of the library, and of any model in it
        raise TargetError(f"{checkpoint.path}: mlx-lm {version()} cannot load it: {_one_line(error)}") from error
    known = variants(model_type)[0]
    try:
        calls, caches = calls_of(model)
        windows = windows_of(files.config, calls, caches, len(model.layers))
    except TargetError as error:
        raise TargetError(f"{checkpoint.path}: {error}") from error
    except Exception as error:  # a model that cannot go forward with two tokens
        raise TargetError(f"{checkpoint.path}: its first forward failed: {_one_line(error)}") from error
    limits = [f"weights of {checkpoint.path}, computed in float32 (stored as {', '.join(files.dtypes)})"]
    if sizes := sorted({window for window in windows if window}):
        limits.append(f"a window ({', '.join(map(str, sizes))}) hides something only in programs that are longer")
    described = replace(known, variant=Path(checkpoint.path).name, config=files.config, windows=windows, calls=calls)
    return Loaded(model, model_type, replace(described, limits=(*limits, *known.limits)))


def calls_of(model: Any) -> tuple[tuple[tuple[int, int], ...], tuple[Any, ...]]:
    """As ``Family.calls``, and the cache of every call, by a forward in which every cache says when it is written, and
    every layer when it begins.

    TargetError where no cache has keys, and where a call does not follow on one cache that was written for it alone:
    nothing tells then what it reads (a layer may attend to the keys of another).
    """
    caches = library().make_prompt_cache(model)
    with_keys = [leaf for _, leaf in held.leaves(caches) if not held.is_state(leaf)]
    if not with_keys:
        raise TargetError(f"its model cannot be judged: {held.NO_KEYS}")
    written: list[tuple[int, int, int]] = []  # layer, cache, and how many attention calls came before
    with Probe().watching() as record, _begun(model.layers) as begun:
        for number, leaf in enumerate(with_keys):

            def noting(*given: Any, number: int = number, update: Any = leaf.update_and_fetch, **named: Any) -> Any:
                layer = begun[-1] if begun else -1  # a model that calls parts of its layers has begun none
                written.append((layer, number, len(record.raw_attention)))
                return update(*given, **named)

            leaf.update_and_fetch = noting
        mx.eval(model(mx.array([[1, 2]]), cache=caches))
    seen = len(record.raw_attention)
    if not seen or [before for _, _, before in written] != list(range(seen)):
        raise TargetError(
            "which cache an attention call reads cannot be told: its layers do not all attend to keys of their own"
        )
    calls = tuple((layer, number) for layer, number, _ in written)
    return calls, tuple(with_keys[number] for _, number in calls)


@contextmanager
def _begun(layers: Sequence[Any]) -> Iterator[list[int]]:
    """The numbers of the layers whose forward has begun, in that order."""
    begun: list[int] = []
    numbers = {id(layer): number for number, layer in enumerate(layers)}

    def telling(forward: Any) -> Any:
        def told(layer: Any, *given: Any, **named: Any) -> Any:
            begun.extend(numbers[one] for one in (id(layer),) if one in numbers)
            return forward(layer, *given, **named)

        return told

    forwards: dict[Any, Any] = {kind: kind.__call__ for kind in map(type, layers)}
    for kind, forward in forwards.items():
        kind.__call__ = telling(forward)
    try:
        yield begun
    finally:
        for kind, forward in forwards.items():
            kind.__call__ = forward


def windows_of(
    config: dict[str, Any], calls: Sequence[tuple[int, int]], caches: Sequence[Any], layers: int
) -> tuple[int | None, ...]:
    """Of every attention call: by ``layer_types`` where the config has them, which then judge the caches as well, else
    by the window in which its cache rotates.

    TargetError where the config has a window, and neither says which layers it is for.
    """
    config = config.get("text_config", config)
    window = config.get("sliding_window")
    window = window if type(window) is int and window > 0 and config.get("use_sliding_window", True) else None
    types = config.get("layer_types")
    if isinstance(types, list) and len(types) == layers and "sliding_attention" in types:
        if window is None:
            raise TargetError("layer_types has sliding_attention, but there is no sliding_window")
        return tuple(window if types[layer] == "sliding_attention" else None for layer, _ in calls)
    rotating = tuple(int(cache.max_size) if held.kind_of(cache) == "rotating" else None for cache in caches)
    if window is not None and window < FAR and not any(rotating):
        raise TargetError(f"sliding_window is {window}, but neither layer_types nor a cache says of which layers")
    return rotating


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split()) or type(error).__name__:.300}"
