"""Typed fields of a config.json, and its two dialects of RoPE settings.

transformers 4 has ``rope_theta`` and ``rope_scaling`` beside the other fields; transformers 5 has both inside
``rope_parameters``. Files of either kind are in use, and some hold both.
"""

from collections.abc import Mapping, Sequence
from typing import Any

Json = Mapping[str, Any]
ROPE_NAMES = ("rope_parameters", "rope_scaling")

LARGEST_CONTEXT = 1 << 40
#: Largest sizes that are taken seriously; far above every published model, far below what would exhaust memory.
LARGEST: Mapping[str, int] = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "moe_intermediate_size": 1 << 24,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "image_token_id": 1 << 24,
    "video_token_id": 1 << 24,
    # of vision towers
    "depth": 1 << 12,
    "embed_dim": 1 << 20,
    "out_hidden_size": 1 << 20,
    "num_position_embeddings": 1 << 24,
    "mlp_ratio": 1 << 8,
    "in_channels": 1 << 8,
    "in_chans": 1 << 8,
    "patch_size": 1 << 10,
    "spatial_merge_size": 1 << 6,
    "temporal_patch_size": 1 << 8,
    "sliding_window": 1 << 40,
    "max_position_embeddings": LARGEST_CONTEXT,
}
LARGEST_OTHER = 1 << 16


class ConfigError(ValueError):
    """A config that cannot be used; one line that names the field."""


class Fields:
    """One JSON object of a config. A null counts as absent, as it does in the published readers.

    Every reader raises ConfigError, naming the field, for a missing field without default or a value of another
    type or out of range.
    """

    def __init__(self, data: Json, where: str = ""):
        self.data, self.where = data, where

    def __contains__(self, name: str) -> bool:
        return self.data.get(name) is not None

    def title(self, name: str) -> str:
        """The field's name with where it stands."""
        return f"{self.where}.{name}" if self.where else name

    def value(self, name: str, default: Any = ...) -> Any:
        """The raw value."""
        found = self.data.get(name)
        if found is None:
            if default is ...:
                raise ConfigError(f"{self.title(name)} is missing")
            return default
        return found

    def size(self, name: str, default: Any = ..., low: int = 1) -> Any:
        """A whole number between ``low`` and what is taken seriously for that field; or the default."""
        found = self.value(name, default)
        if found is default:
            return found
        if isinstance(found, bool) or not isinstance(found, (int, float)) or found != found or found % 1:
            raise ConfigError(f"{self.title(name)} must be a whole number, not {found!r:.60}")
        high = LARGEST.get(name, LARGEST_OTHER)
        if not low <= found <= high:
            raise ConfigError(f"{self.title(name)} must lie in {low}..{high}, not {found!r:.60}")
        return int(found)

    def number(self, name: str, default: Any = ..., high: float = 1e15) -> Any:
        """A finite number of at most ``high`` either way; or the default."""
        found = self.value(name, default)
        if found is default:
            return found
        if isinstance(found, bool) or not isinstance(found, (int, float)) or not -high <= found <= high:
            raise ConfigError(f"{self.title(name)} must be a finite number, not {found!r:.60}")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        """true or false."""
        found = self.value(name, default)
        if not isinstance(found, bool):
            raise ConfigError(f"{self.title(name)} must be true or false, not {found!r:.60}")
        return found

    def text(self, name: str, default: Any = ...) -> Any:
        """A string; or the default."""
        found = self.value(name, default)
        if found is not default and not isinstance(found, str):
            raise ConfigError(f"{self.title(name)} must be text, not {found!r:.60}")
        return found

    def nested(self, name: str) -> "Fields":
        """A nested object; an absent one is empty."""
        found = self.value(name, {})
        if not isinstance(found, Mapping):
            raise ConfigError(f"{self.title(name)} must be an object, not {found!r:.60}")
        return Fields(found, self.title(name))

    def sizes(self, name: str, default: Sequence[int] = ()) -> tuple[int, ...]:
        """A list of whole numbers >= 0."""
        found = self.value(name, list(default))
        good = isinstance(found, Sequence) and all(type(n) is int and 0 <= n <= LARGEST_OTHER for n in found)
        if not good or isinstance(found, str):
            raise ConfigError(f"{self.title(name)} must be a list of whole numbers, not {found!r:.60}")
        return tuple(found)

    def numbers(self, name: str) -> tuple[float, ...]:
        """A list of finite numbers."""
        found = self.value(name)
        if not isinstance(found, list) or len(found) > LARGEST_OTHER:
            raise ConfigError(f"{self.title(name)} must be a list of numbers, not {found!r:.60}")
        entries = Fields({f"{name}[{index}]": entry for index, entry in enumerate(found)}, self.where)
        return tuple(entries.number(entry) for entry in entries.data)

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list of names; None where it is absent."""
        found = self.value(name, None)
        if found is not None and not (isinstance(found, list) and all(isinstance(entry, str) for entry in found)):
            raise ConfigError(f"{self.title(name)} must be a list of names, not {found!r:.60}")
        return None if found is None else tuple(found)

    def refuse(self, name: str, *harmless: object, why: str) -> None:
        """ConfigError if the field holds anything but null or a harmless value: the model would be another one."""
        found = self.data.get(name)
        if found is not None and found not in harmless:
            raise ConfigError(f"{self.title(name)} is {found!r:.60}: {why}")


def rope_fields(fields: Fields) -> Fields:
    """The RoPE settings of either dialect in one object, ``rope_theta`` and ``rope_type`` in it.

    ConfigError when the two dialects stand side by side and disagree.
    """
    merged: dict[str, Any] = {}
    where = ""
    for name in ROPE_NAMES:
        found = fields.nested(name)
        for key, value in found.data.items():
            if value is None:
                continue
            if key in merged and merged[key] != value:
                raise ConfigError(f"{found.title(key)} is {value!r:.40}, but {where}.{key} is {merged[key]!r:.40}")
            merged[key] = value
        where = where or (found.where if found.data else "")
    if "rope_theta" in fields:
        outer = fields.value("rope_theta")
        if merged.setdefault("rope_theta", outer) != outer:
            raise ConfigError(f"{fields.title('rope_theta')} is {outer!r:.40}, but {where} says {merged['rope_theta']}")
    merged["rope_type"] = merged.get("rope_type", merged.pop("type", "default"))
    merged.pop("type", None)
    return Fields(merged, where or fields.title("rope_scaling"))


def common_fields(text: Fields) -> dict[str, Any]:
    """What every family has, under one name."""
    text.refuse("hidden_act", "silu", why="only silu is modelled")
    return {
        "vocab_size": text.size("vocab_size"),
        "hidden_size": text.size("hidden_size"),
        "num_hidden_layers": text.size("num_hidden_layers"),
        "num_attention_heads": text.size("num_attention_heads"),
    }


def context_size(rope_settings: Fields) -> int:
    """``original_max_position_embeddings`` of some RoPE settings, in tokens."""
    return int(rope_settings.number("original_max_position_embeddings", high=LARGEST_CONTEXT))
