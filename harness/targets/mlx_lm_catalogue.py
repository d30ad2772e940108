"""The catalogue of mlx-lm's families: a TOML file for every configuration, ``<model type>.toml`` or ``<model
type>+<variant>.toml``. All are tiny, and ours."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

FOLDER = Path(__file__).parent / "mlx_lm_families"
PLAIN = "tiny"

Attention = Literal["grouped", "latent", "shared keys", "grouped, with states", "latent, with states"]


@dataclass(frozen=True)
class Family:
    """One configuration of one ``mlx_lm.models`` module.

    ``attention``: how keys are made (``with states``: other layers are recurrent, convolve, or remember tokens).
    ``windows``: of every attention call of a forward, in call order, by what the configuration says of its layer, None
    where it has none; () where no layer has any. ``calls``: of every attention call its layer and the cache that it
    reads, counted over the caches with keys; () where every layer attends to the keys of its own. ``module``: where it
    is not the model type. ``limits``: what a run cannot show. ``pending``: why it cannot be judged, "" if it can.
    """

    variant: str
    config: dict[str, Any]
    attention: Attention = "grouped"
    windows: tuple[int | None, ...] = ()
    calls: tuple[tuple[int, int], ...] = ()
    module: str = ""
    limits: tuple[str, ...] = ()
    pending: str = ""


Kind = TypeVar("Kind", bound=Family)


def _read(path: Path, kind: type[Kind]) -> Kind:
    data = tomllib.loads(path.read_text())
    data["windows"] = tuple(window or None for window in data.get("windows", ()))  # TOML has no null: 0
    data["calls"] = tuple((layer, cache) for layer, cache in data.get("calls", ()))
    data["limits"] = tuple(data.get("limits", ()))
    return kind(path.stem.partition("+")[2] or PLAIN, **data)


def catalogue(folder: Path, kind: type[Kind]) -> tuple[dict[str, tuple[Kind, ...]], dict[str, str]]:
    """Every configuration in a folder, by model type; and of those model types that cannot be judged yet, why."""
    families: dict[str, tuple[Kind, ...]] = {}
    pending: dict[str, str] = {}
    for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem):
        family, model_type = _read(path, kind), path.stem.partition("+")[0]
        if family.pending:
            pending[model_type] = family.pending
        else:
            families[model_type] = (*families.get(model_type, ()), family)
    return families, pending


FAMILIES, WITHOUT_ENTRY = catalogue(FOLDER, Family)
