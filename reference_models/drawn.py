"""Variants whose configuration was drawn: made from a seed, written with all that they are, read back."""

import random
from collections.abc import Sequence
from typing import Any, TypeVar

from mlx.utils import tree_flatten

from reference_models import registry
from reference_models.config_json import config_from_fields, config_to_fields
from reference_models.drawing import draw_config
from reference_models.hf.fields import ConfigError
from reference_models.registry import OPTIONS, Variant

T = TypeVar("T")

#: What a variant that is read may have, in parameters (float32): 16 MB, several times what is drawn.
MOST_PARAMETERS = 4_000_000
_ATTEMPTS = 50


def drawn_variants(family: str, seed: int, count: int, *, images: bool = False) -> tuple[Variant, ...]:
    """``drawn-1`` to ``drawn-<count>``, none equal to another or to a built-in one; a larger count only adds to them.

    ``images``: each with a vision tower. Raises UnknownFamily; ValueError for images of a family without towers;
    RuntimeError when the family does not allow that many.
    """
    known = [(variant.config, variant.options) for variant in registry.variants(family)]
    uniform = random.Random(seed).random  # the one method that gives the same numbers in every version of Python

    def choose(options: Sequence[T], /) -> T:
        return options[int(uniform() * len(options))]

    made: list[Variant] = []
    for number in range(1, count + 1):
        for _ in range(_ATTEMPTS):
            config = draw_config(family, choose, images=images, windows=True)
            options = choose(OPTIONS.get(family, ({},)))
            if (config, options) not in known:
                break
        else:
            raise RuntimeError(f"{family} has no {count} configurations to draw")
        known.append((config, options))
        made.append(Variant(family, f"drawn-{number}", config, options, drawn=True))
    return tuple(made)


def variant_to_json(variant: Variant) -> dict[str, Any]:
    """Configuration and options; what ``read_variant`` needs beside the name."""
    return {"config": config_to_fields(variant.config), "options": dict(variant.options)}


def read_variant(family: str, name: str, data: object) -> Variant:
    """The drawn variant that ``variant_to_json`` wrote. Nothing is allocated before its size is known.

    Raises UnknownFamily, and ConfigError with one line for whatever cannot be built or is too large.
    """
    kind = registry.config_class(family)
    number = name.removeprefix("drawn-")
    if number == name or not number.isdecimal() or not number.isascii() or len(number) > 6:
        raise ConfigError(f"a drawn variant is called drawn-1, drawn-2, ..., not {name!r:.60}")
    if not isinstance(data, dict) or set(data) != {"config", "options"}:
        raise ConfigError("what was drawn must be an object with config and options")
    config = config_from_fields(kind, data["config"])
    if data["options"] not in OPTIONS.get(family, ({},)):
        raise ConfigError(f"{family} cannot be built with the options {data['options']!r:.60}")
    variant = Variant(family, name, config, dict(data["options"]), drawn=True)
    parameters = _parameters(variant)
    if parameters > MOST_PARAMETERS:
        raise ConfigError(f"the model has {parameters:,} parameters; at most {MOST_PARAMETERS:,} are built from a file")
    return variant


def _parameters(variant: Variant) -> int:
    """How many there would be: arrays are lazy, so that their shapes cost nothing."""
    try:
        leaves: Any = tree_flatten(variant.model().parameters())
        return sum(array.size for _, array in leaves)
    except (ValueError, TypeError, ArithmeticError, RuntimeError) as error:  # a width that no array can have, say
        raise ConfigError(f"config: no model can be built from it: {error}") from error
