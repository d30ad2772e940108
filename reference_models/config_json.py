"""A ``Config`` of one of our families as JSON and back, checked against the annotations of its fields.

For configurations that have no name, only themselves: those that a campaign drew. ``hf`` reads what others publish,
with their dialects and defaults; here every field is written as it is, a vision tower included, and what comes back is
equal. What is read is untrusted: sizes are bounded far below what a machine would notice, and far above what is drawn.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

from reference_models.hf.fields import ConfigError

#: Largest whole numbers, for fields that are no size of an array, or of many small ones.
LARGEST: Mapping[str, int] = {
    "vocab_size": 1 << 16,
    "num_hidden_layers": 64,
    "depth": 64,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "num_heads": 128,
    "patch_size": 32,
    "temporal_patch_size": 8,
    "spatial_merge_size": 8,
    "in_channels": 8,
    "image_token_id": 1 << 24,
    "video_token_id": 1 << 24,
    "max_position_embeddings": 1 << 40,
    "original_max_position_embeddings": 1 << 40,
    "sliding_window": 1 << 40,
}
LARGEST_OTHER = 1 << 12
LARGEST_NUMBER = 1e9
MOST_ENTRIES = 64


def config_to_fields(config: Any) -> dict[str, Any]:
    """Every field, nested ones as objects and tuples as lists."""
    return {field.name: _plain(getattr(config, field.name)) for field in dataclasses.fields(config)}


def config_from_fields(kind: type, data: object) -> Any:
    """The Config of class ``kind`` that ``config_to_fields`` wrote.

    A field may be missing if it has a default, so that a file outlives a field that was added later. Raises ConfigError
    with one line that names the field.
    """
    return _read(kind, data, "config")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return config_to_fields(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _read(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return _object(hint, value, where)
    if origin in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return None if value is None and len(kinds) < len(get_args(hint)) else _read(kinds[0], value, where)
    if origin is tuple:
        return _entries(get_args(hint), value, where)
    if origin is Literal:
        if not isinstance(value, str) or value not in get_args(hint):
            raise ConfigError(f"{where} must be one of {', '.join(get_args(hint))}, not {value!r:.60}")
        return value
    return _scalar(hint, value, where)


def _object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be an object, not {value!r:.60}")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(str(name) for name in value if name not in fields):
        raise ConfigError(f"{where} has no field {unknown[0]!r:.60}")
    hints = typing.get_type_hints(kind)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _read(hints[name], value[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}.{name} is missing")
    try:
        return kind(**arguments)
    except ConfigError:
        raise
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _entries(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list) or len(value) > MOST_ENTRIES:
        raise ConfigError(f"{where} must be a list of at most {MOST_ENTRIES} entries, not {value!r:.60}")
    if hints[-1] is Ellipsis:
        hints = hints[:1] * len(value)
    if len(value) != len(hints):
        raise ConfigError(f"{where} must have {len(hints)} entries, not {len(value)}")
    return tuple(_read(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(zip(hints, value, strict=True)))


def _scalar(kind: Any, value: Any, where: str) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, not {value!r:.60}")
    elif kind is int:
        high = LARGEST.get(where.rpartition(".")[2], LARGEST_OTHER)
        if type(value) is not int or not 0 <= value <= high:
            raise ConfigError(f"{where} must be a whole number in 0..{high}, not {value!r:.60}")
    elif kind is float:
        if type(value) not in (int, float) or not math.isfinite(value) or abs(value) > LARGEST_NUMBER:
            raise ConfigError(f"{where} must be a number of at most {LARGEST_NUMBER:g} either way, not {value!r:.60}")
        return float(value)
    elif kind is not str or not isinstance(value, str) or len(value) > MOST_ENTRIES:
        raise ConfigError(f"{where} must be a short text, not {value!r:.60}")
    return value
