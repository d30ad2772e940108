"""The models of mlx-vlm on the library's own caches: ``mlx_vlm:<model type>`` reads text, and
``mlx_vlm:<model type>+images`` prompts with images. Of these the language half is judged, with what the library makes
of a prompt; not what its vision tower makes of a picture.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast, get_args

import mlx.core as mx

from harness.operations import Owner
from harness.oracle import Expected, History
from harness.rules import CacheRule
from harness.target import Capability, ImageFormat, Path, TargetIdentity
from harness.targets import mlx_lm_caches as held
from harness.targets.device import device
from harness.targets.mlx_lm_free import PathOfTokens, expected_of
from harness.targets.mlx_vlm_models import (
    FAMILIES,
    Caches,
    NotInstalled,
    UnknownFamily,
    VisionFamily,
    build,
    frames_apart,
    probe,
    variants,
    version,
)
from harness.targets.mlx_vlm_session import VisionSession, read_images
from harness.targets.naming import Asked, Subject, TargetError

KIND = "mlx_vlm"
PATHS: tuple[Path, ...] = get_args(Path)
LACKS = frozenset(
    {
        Capability.FRONT_TRIM,
        Capability.ENFORCE,
        Capability.OWNERSHIP,
        Capability.COUNTERPART,
        Capability.ARGUMENTS,
        Capability.BYTES,
        Capability.FOOTPRINT,
        Capability.SAVE_LOAD,
        Capability.QUANTISE,
        Capability.INT8,
        Capability.UNPADDED,
        Capability.WITNESS,
    }
)
"""What no target of this kind can do."""


@dataclasses.dataclass(frozen=True)
class MlxVlmTarget:
    """One family of mlx-vlm, on one path."""

    model_type: str
    variant: str = "tiny"
    path: Path = "text"
    weights_seed: int = 0

    @property
    def family(self) -> VisionFamily:
        return next(family for family in variants(self.model_type) if family.variant == self.variant)

    @functools.cached_property
    def identity(self) -> TargetIdentity:
        return TargetIdentity(
            kind=KIND,
            family=self.model_type,
            variant=self.variant,
            policy="library",
            storage="rows",
            weights_seed=self.weights_seed,
            detail={"config": self.family.config, "mlx-vlm": version()},
            path=self.path,
        )

    @property
    def _model(self) -> Any:
        return build(self.model_type, self.variant, self.weights_seed)

    @functools.cached_property
    def _leaves(self) -> tuple[tuple[int, Any], ...]:
        """Fresh caches of a sequence, by layer."""
        return tuple(held.leaves(Caches(self._model.language_model).make_prompt_cache()))

    @functools.cached_property
    def _calls(self) -> tuple[int, ...]:
        """The leaf of every attention call."""
        return tuple(at for at, (_, cache) in enumerate(self._leaves) if not held.is_state(cache))

    @functools.cached_property
    def capabilities(self) -> frozenset[Capability]:
        lacks = LACKS | ({Capability.IMAGES} if self.path == "text" else set())
        if not self._rotates:
            lacks |= {Capability.POSITIONS}
        return frozenset(Capability) - lacks

    @functools.cached_property
    def _rotates(self) -> bool:
        """Does the probe see a call of a rotation?"""
        model, ids = self._model.language_model, mx.array([[1, 2]])
        with probe().watching() as record:
            mx.eval(model(ids, cache=Caches(model).make_prompt_cache(), rope_deltas=mx.array([[0]])).logits)
        return bool(record.positions())

    @property
    def images(self) -> ImageFormat | None:
        return self.family.images(frames_apart(self.model_type, self.variant)) if self.path == "images" else None

    @property
    def vocab_size(self) -> int:
        return int(self.family.text["vocab_size"])

    @functools.cached_property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(self._leaves[at][0] for at in self._calls)

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        return self.family.windows or (None,) * len(self._calls)

    @functools.cached_property
    def rules(self) -> tuple[CacheRule | None, ...]:
        return tuple(held.rule_of(self._leaves[at][1]) for at in self._calls)

    @property
    def row_storage(self) -> str:
        return "rows"

    @property
    def row_widths(self) -> tuple[tuple[int, int], ...]:  # asked with QUANTISE only, which is in LACKS
        raise NotImplementedError("caches of mlx-vlm are not quantised in mid-program here")

    def open(self, owners: tuple[Owner, ...]) -> VisionSession:
        return VisionSession(self._model, self._calls, owners)

    def renew(self) -> None:
        build.cache_clear()
        self.__dict__.pop("_leaves", None)

    def counterpart(self) -> None:
        return None

    def witness(self, history: History) -> Expected:  # asked with WITNESS only, which is in LACKS
        raise NotImplementedError("no independent witness of mlx-vlm's families in float64 is asked here")

    def cache_free(self, history: History) -> Expected:
        """The language half without a cache, over what the library made of prompts, with the ids of the ledger."""
        return expected_of(history, lambda path: self._at_once(history, path))

    def _at_once(self, history: History, path: PathOfTokens) -> mx.array:
        tokens = mx.array(path.tokens[None])
        model = self._model.language_model
        embeddings = model.model.embed_tokens(tokens)
        given: dict[str, Any] = {"position_ids": mx.array(history.places[:, None, path.rows])}
        numbers = history.prompt_of[path.rows]
        length = int((numbers >= 0).sum())  # a prompt with images comes first in its sequence
        if length:
            reading = read_images(self._model, history.prompts[numbers[0]])
            embeddings = mx.concatenate([reading.embeddings[:, :length], embeddings[:, length:]], axis=1)
            given |= _deepstack(reading.given, length, tokens.shape[1])
        out: mx.array = model(tokens, inputs_embeds=embeddings, cache=None, **given).logits
        return out


def _deepstack(given: dict[str, Any], length: int, total: int) -> dict[str, Any]:
    """Of what a prompt was read as, what goes into layers further up: at its first ``length`` tokens, of ``total``."""
    if given.get("deepstack_visual_embeds") is None:
        return {}
    mask = given["visual_pos_masks"][:, :length]
    shown = int(mask.sum())
    return {
        "visual_pos_masks": mx.concatenate([mask, mx.zeros((1, total - length), mx.bool_)], axis=1),
        "deepstack_visual_embeds": [layer[:shown] for layer in given["deepstack_visual_embeds"]],
    }


def resolve(name: str) -> tuple[MlxVlmTarget, ...]:
    """The targets that ``mlx_vlm:<model type>`` or ``mlx_vlm:<model type>+images`` names, one for every variant.

    Raises UnknownFamily or NotInstalled, with one line.
    """
    kind, _, rest = name.partition(":")
    model_type, plus, path = rest.partition("+")
    if kind != KIND or not model_type or (plus and path not in PATHS):
        raise UnknownFamily(f"{name!r:.60} is not {KIND}:<model type> or {KIND}:<model type>+images")
    on = cast(Path, path or "text")
    made = tuple(MlxVlmTarget(model_type, family.variant, on) for family in variants(model_type))
    for target in made:
        build(model_type, target.variant, target.weights_seed)
    return made


def names() -> tuple[str, ...]:
    """Of all families of the catalogue, on every path."""
    return tuple(f"{KIND}:{family}" + ("" if path == "text" else f"+{path}") for family in FAMILIES for path in PATHS)


def subject(rest: str, asked: Asked) -> Subject:
    """``MODEL_TYPE``, or its path with images, ``MODEL_TYPE+images``. Raises TargetError."""
    name = f"{KIND}:{rest}"
    try:
        found = resolve(name)
    except (UnknownFamily, NotInstalled) as error:
        raise TargetError(str(error)) from error
    if asked.policy != "live":
        raise TargetError(f"{name}: the masks of the library's own caches have no other policy")
    ours = tuple(dataclasses.replace(one, weights_seed=asked.seed) for one in found)
    first = ours[0]
    return Subject(KIND, first.model_type, ours, f"{device()}, mlx-vlm {version()}", first.path, limits(first))


def target_from_identity(data: dict[str, Any], asked: Asked | None = None) -> MlxVlmTarget:
    """Rebuild the target that a trace names. Raises TargetError, with one line."""
    path, seed = data.get("path", "text"), data.get("weights_seed")
    try:
        named = resolve(f"{KIND}:{data.get('family')}+{path}")
    except (UnknownFamily, NotInstalled) as error:
        raise TargetError(str(error)) from error
    found = [target for target in named if target.variant == data.get("variant")]
    if not found or data.get("policy") != "library" or type(seed) is not int:
        raise TargetError(f"no variant, policy and seed of {KIND}:{data.get('family')} are {data!r:.80}")
    return dataclasses.replace(found[0], weights_seed=seed)


def limits(target: MlxVlmTarget) -> tuple[str, ...]:
    """What a run of this target cannot show, one phrase each."""
    said = [
        "tiny configurations of ours with random float32 weights",
        "no independent witness in float64",
        "the caches of the library have no front trim, and it writes none to a file",
    ]
    if target.path == "images":
        said += [
            "what the vision tower makes of a picture is taken as it is",
            "rows that read a prompt beside others behind theirs, which the library never has, are given their ids",
            "a rollback into a prompt, which the library never does, takes its ids cut there",
        ]
    else:
        said.append("no prompt holds an image: the path with images has a run and a report of its own")
    return (*said, *target.family.limits)


__all__ = [
    "MlxVlmTarget",
    "NotInstalled",
    "UnknownFamily",
    "limits",
    "names",
    "resolve",
    "subject",
    "target_from_identity",
]
