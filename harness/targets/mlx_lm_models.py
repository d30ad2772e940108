"""Builds the models of mlx-lm, and is where the library is imported: what differs between its releases ends here and in
``mlx_lm_caches``."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from harness.targets.mlx_lm_catalogue import FAMILIES, WITHOUT_ENTRY, Family, unknown
from harness.targets.mlx_lm_session import Library


class UnknownFamily(ValueError):
    """A name that is none of a target of this kind."""


class NotInstalled(ValueError):
    """mlx-lm is not there, or its release has no such model."""


def library() -> Library:
    """``mlx_lm.models.cache``. NotInstalled where there is none."""
    try:
        return cast(Library, importlib.import_module("mlx_lm.models.cache"))
    except ImportError as error:
        raise NotInstalled("mlx-lm is not installed: pip install 'mlx-kv-harness[mlx-lm]'") from error


@dataclass(frozen=True)
class Bounded:
    """The library, asked for caches of at most ``max_kv_size`` keys: rotating ones, which keep the first for good."""

    max_kv_size: int

    def make_prompt_cache(self, model: Any) -> list[Any]:
        """Of one sequence."""
        return cast(list[Any], cast(Any, library()).make_prompt_cache(model, max_kv_size=self.max_kv_size))

    def __getattr__(self, name: str) -> Any:
        return getattr(library(), name)


def version() -> str:
    """Of mlx-lm. NotInstalled where there is none."""
    library()
    return str(importlib.import_module("mlx_lm").__version__)


def shipped() -> tuple[str, ...]:
    """Modules of ``mlx_lm.models`` from which the library makes a model: those with a ``Model`` and a ``ModelArgs``.
    Sources are read and none is imported, since one of them ends the process where a package of its own is missing.
    NotInstalled where there is no mlx-lm."""
    library()
    spec = importlib.util.find_spec("mlx_lm.models")
    folders = [] if spec is None else map(Path, spec.submodule_search_locations or ())
    paths = (path for folder in folders for path in folder.glob("*.py"))
    return tuple(sorted(path.stem for path in paths if {"Model", "ModelArgs"} <= set(_names(path))))


def _names(path: Path) -> Iterator[str]:
    """What a module binds at its top level: classes, imports, plain assignments. Nothing of one that cannot be read."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


@functools.lru_cache(maxsize=64)
def build(model_type: str, variant: str, seed: int) -> Any:
    """A tiny model with the weights of this seed. UnknownFamily where the library cannot build it."""
    family = next(each for each in variants(model_type) if each.variant == variant)
    library()
    name = family.module or model_type
    try:
        module = importlib.import_module(f"mlx_lm.models.{name}")
    except ImportError as error:
        why = f"cannot import its model {name}: {_told(error)}" if name in shipped() else f"has no model {name}"
        raise NotInstalled(f"mlx-lm {version()} {why}") from error
    try:
        arguments = module.ModelArgs.from_dict({"model_type": model_type, **copy.deepcopy(family.config)})
        return randomised(lambda: module.Model(arguments), seed)
    except Exception as error:  # whatever a constructor thinks of these numbers
        raise UnknownFamily(
            f"{_called(family, model_type)}: mlx-lm {version()} cannot build it: {_told(error)}"
        ) from error


def _called(family: Family, model_type: str) -> str:
    return f"mlx_lm:{model_type} ({family.variant})"


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def check_forward(family: Family, model_type: str, forward: Callable[[], object], calls: int) -> None:
    """UnknownFamily for a configuration with which the model cannot go forward, or whose windows are not one for each
    of its attention calls."""
    try:
        forward()
    except Exception as error:  # of the library
        raise UnknownFamily(f"{_called(family, model_type)}: a forward of two tokens raised {_told(error)}") from error
    if family.windows and len(family.windows) != calls:
        raise UnknownFamily(
            f"{_called(family, model_type)}: windows has {len(family.windows)} numbers for {calls} attention calls"
        )


def randomised(make: Callable[[], Any], seed: int) -> Any:
    """The model, ready to be asked, with weights that the seed alone decides: fan-in-scaled matrices and convolutions,
    and vectors near what the constructor gave them."""
    mx.random.seed(seed)  # constructors draw biases and decays, which a trace must find again
    model = make()
    leaves: Any = tree_flatten(model.parameters())
    draw = np.random.default_rng(seed)
    made = []
    for name, array in sorted(leaves, key=lambda leaf: str(leaf[0])):
        noise = draw.standard_normal(array.shape).astype(np.float32)
        if array.ndim > 1:
            fan_in = np.prod(array.shape[1:]) if array.ndim > 3 else array.shape[-1]
            made.append((name, mx.array(noise / np.sqrt(fan_in, dtype=np.float32))))
        else:
            made.append((name, array.astype(mx.float32) + mx.array(0.1 * noise)))
    model.update(tree_unflatten(made))
    model.eval()
    mx.eval(model.parameters())
    return model


def variants(model_type: str) -> tuple[Family, ...]:
    """The configurations of a model type. UnknownFamily where there are none, with the reason."""
    if model_type in WITHOUT_ENTRY:
        raise UnknownFamily(f"mlx_lm:{model_type} cannot be judged: {WITHOUT_ENTRY[model_type]}")
    if model_type not in FAMILIES:
        raise UnknownFamily(unknown(model_type, FAMILIES, "mlx_lm"))
    return FAMILIES[model_type]


def named_by(model_type: str) -> str:
    """The name in the catalogue of what a ``config.json`` calls its ``model_type``: itself, or that of the entry whose
    module the library loads for it. What the catalogue has not comes back as it is."""
    if model_type in FAMILIES or model_type in WITHOUT_ENTRY:
        return model_type
    try:
        others: dict[str, str] = importlib.import_module("mlx_lm.utils").MODEL_REMAPPING
    except (ImportError, AttributeError):  # not installed, or a release without such a table
        others = {}
    module = others.get(model_type, model_type)
    return next((name for name, entries in FAMILIES.items() if (entries[0].module or name) == module), model_type)
