"""The catalogue of mlx-lm's families: a TOML file for every configuration, ``<model type>.toml`` or ``<model
type>+<variant>.toml``. All are tiny, and ours."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

FOLDER = Path(__file__).parent / "mlx_lm_families"
PLAIN = "tiny"

Attention = Literal["grouped", "latent", "shared keys", "grouped, with states", "latent, with states", "states alone"]


@dataclass(frozen=True)
class Family:
    """One configuration of one ``mlx_lm.models`` module.

    ``attention``: how keys are made (``with states``: other layers are recurrent, convolve, or remember tokens;
    ``states alone``: all are, and there are no keys).
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
    """ValueError with one line for a file that is no configuration."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    names = {field.name for field in fields(kind)} - {"variant"}
    if odd := sorted(set(data) - names):
        raise ValueError(f"unknown field {odd[0]!r}; there are {', '.join(sorted(names))}")
    if not isinstance(data.get("config"), dict):
        raise ValueError("it has no table [config]")
    if data.get("attention", "grouped") not in get_args(Attention):
        raise ValueError(
            f"attention must be one of {', '.join(map(repr, get_args(Attention)))}, not {data['attention']!r}"
        )
    windows, calls = data.get("windows", []), data.get("calls", [])
    if not _whole(windows):
        raise ValueError(f"windows must be a list of whole numbers (0: none), not {windows!r:.60}")
    if not isinstance(calls, list) or not all(_whole(call) and len(call) == 2 for call in calls):
        raise ValueError(f"calls must be a list of pairs [layer, cache], not {calls!r:.60}")
    size = (data["config"].get("text_config") or data["config"]).get("vocab_size")
    if type(size) is not int or size < 1:
        raise ValueError(f"config.vocab_size must be a whole number above 0, not {size!r:.60}")
    data["windows"] = tuple(window or None for window in windows)  # TOML has no null: 0
    data["calls"] = tuple((layer, cache) for layer, cache in calls)
    data["limits"] = tuple(data.get("limits", ()))
    return kind(path.stem.partition("+")[2] or PLAIN, **data)


def _whole(numbers: Any) -> bool:
    return isinstance(numbers, list) and all(type(number) is int and number >= 0 for number in numbers)


def catalogue(folder: Path, kind: type[Kind]) -> tuple[dict[str, tuple[Kind, ...]], dict[str, str]]:
    """Every configuration in a folder, by model type; and of those model types that cannot be judged (yet, or because
    one of their files is broken), why. No file breaks another."""
    families: dict[str, tuple[Kind, ...]] = {}
    pending: dict[str, str] = {}
    for path in sorted(folder.glob("*.toml"), key=lambda path: path.stem):
        model_type = path.stem.partition("+")[0]
        try:
            family = _read(path, kind)
        except (OSError, ValueError, TypeError, AttributeError) as error:  # no TOML is a ValueError, too
            pending[model_type] = f"{path.name}: {' '.join(str(error).split())}"
            continue
        if family.pending:
            pending[model_type] = family.pending
        else:
            families[model_type] = (*families.get(model_type, ()), family)
    return families, pending


def unknown(name: str, known: Collection[str], kind: str) -> str:
    """What to say of a name that a catalogue lacks: the nearest ones, and what lists all. ``kind``: of target."""
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    nearest = f"nearest: {', '.join(near)}; " if near else ""
    return f"{kind} has no family {name!r:.60} in the catalogue; {nearest}kv-harness families --kind {kind} lists them"


FAMILIES, WITHOUT_ENTRY = catalogue(FOLDER, Family)
