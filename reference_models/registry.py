"""All families and the tiny variants of each, simplest first."""

import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, get_args

import mlx.core as mx

from reference_models.engine.batch_cache import Cache
from reference_models.engine.cache_spec import CacheSpec
from reference_models.engine.kv_cache import KVCache, Storage
from reference_models.engine.masks import MaskPolicy
from reference_models.mistral4 import CacheForm
from reference_models.weights import randomise

FAMILIES: tuple[str, ...] = (
    "cohere2",
    "glm4_moe_lite",
    "minicpm3",
    "mistral4",
    "nemotron_nas",
    "olmo3",
    "qwen2_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)
"""Sorted names; each is a module of this package with ``Config``, ``Model`` and ``TINY``."""

_CACHE_FORMS = tuple({"cache_form": form} for form in get_args(CacheForm))
OPTIONS: Mapping[str, tuple[Mapping[str, str], ...]] = dict.fromkeys(
    ("glm4_moe_lite", "minicpm3", "mistral4"), _CACHE_FORMS
)
"""Constructor options that multiply the variants of a family; a family without an entry has none."""


_PATCHES = (
    "images start as flattened patches and video frames as tokens: resizing, normalising and timestamps are left out"
)
_NO_SCHEDULER = (
    "programs enforce the bound as an operation of their own; at which points a server's scheduler does so is checked "
    "by unit tests of the reference scheduler alone: programs run through a scheduler of mlx-lm only (its "
    "BatchGenerator)"
)
LIMITS: Mapping[str, tuple[str, ...]] = {
    "cohere2": ("a configuration without a sliding layer rotates nothing, so that its positions are not judged",),
    "glm4_moe_lite": ("the layer behind the last, which guesses a token further ahead, is not modelled",),
    "mistral4": (
        "published as text_config of mistral3: the pixtral vision tower beside it is not modelled, so no images",
    ),
    "qwen2_vl": (_PATCHES,),
    "qwen3_vl": (_PATCHES,),
    "qwen3_vl_moe": (_PATCHES,),
}
"""What a model here leaves out of its family, in words for a report; a family without an entry leaves out nothing."""


class UnknownFamily(ValueError):
    """There is no reference model of that name; the message names the nearest ones."""


class ReferenceModel(Protocol):
    """What every ``Model`` offers."""

    attention_layers: tuple[int, ...]
    """Model layer of every attention call, in call order, and so of every cache. A model with sliding windows also has
    ``windows``, as long: how many keys a token sees there, its own included, None for all."""

    def make_caches(self, storage: Storage | CacheSpec = "rows") -> list[KVCache]:
        """Empty caches, one per attention layer."""

    def __call__(self, tokens: mx.array, caches: Sequence[Cache], mask_policy: MaskPolicy = "live") -> mx.array:
        """Tokens ``[B, L]`` -> logits ``[B, L, vocab]``; the caches take the tokens."""


@dataclass(frozen=True)
class Variant:
    """One buildable model: a tiny configuration of a family and the constructor options. ``drawn``: its name says
    nothing, the configuration is all there is (see ``reference_models.drawn``)."""

    family: str
    name: str
    config: Any
    options: Mapping[str, str] = field(default_factory=dict, hash=False)
    drawn: bool = False

    def model(self) -> Any:
        """The model with the weights that its layers start with, not computed yet."""
        return _module(self.family).Model(self.config, **self.options)

    @property
    def reads_images(self) -> bool:
        """Does the model have a vision tower?"""
        return getattr(self.config, "vision", None) is not None

    def build(self, seed: int) -> ReferenceModel:
        """The model with random float32 weights of ``seed``."""
        model = self.model()
        randomise(model, seed)
        return cast(ReferenceModel, model)


def variants(family: str) -> tuple[Variant, ...]:
    """All variants of ``family``, simplest first. Raises UnknownFamily."""
    return tuple(
        Variant(family, "-".join((name, *options.values())), config, options)
        for name, config in _module(family).TINY.items()
        for options in OPTIONS.get(family, ({},))
    )


def config_class(family: str) -> type:
    """The ``Config`` of ``family``. Raises UnknownFamily."""
    return cast(type, _module(family).Config)


def limits(family: str) -> tuple[str, ...]:
    """What the reference model of ``family`` leaves out, one phrase each. Raises UnknownFamily."""
    _module(family)
    return (*LIMITS.get(family, ()), _NO_SCHEDULER)


def _module(family: str) -> Any:
    if family not in FAMILIES:
        near = difflib.get_close_matches(family, FAMILIES, n=3) or FAMILIES
        raise UnknownFamily(f"no reference model of family {family!r}; nearest: {', '.join(near)}")
    return importlib.import_module(f"reference_models.{family}")
