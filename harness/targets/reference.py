"""The reference target: the families of ``reference_models`` on the reference engine."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import mlx.core as mx
import numpy as np

from harness.operations import EnforceMaxKvSize, Owner
from harness.oracle import Expected, History
from harness.probe import PositionHook, Probe
from harness.target import (
    CacheLengths,
    CacheRows,
    Capability,
    ForwardObservation,
    ImageFormat,
    Path,
    PromptInput,
    RemovalObservation,
    TargetIdentity,
)
from harness.targets.witnesses import Witnesses, images_of
from reference_models import registry, rope
from reference_models.drawn import drawn_variants, read_variant, variant_to_json
from reference_models.engine import CachePool, KVCache, MaskPolicy, enforce_max_kv_size
from reference_models.hf import ConfigError
from reference_models.prompt import Prompt
from reference_models.registry import FAMILIES, UnknownFamily, Variant, variants

KIND = "reference"
Storage = Literal["rows", "int8"]
STORAGES: tuple[Storage, ...] = get_args(Storage)
POLICIES: tuple[MaskPolicy, ...] = get_args(MaskPolicy)
PATHS: tuple[Path, ...] = get_args(Path)

#: Where our models hand out absolute positions other than through ``mx.fast.rope``.
HOOKS = (
    PositionHook(rope, "mrope_angles", "mrope", lambda position_ids, *_, **__: position_ids),
    PositionHook(rope, "absolute_query_scale", "query_scale", lambda positions, *_, **__: positions),
)


class TargetError(ValueError):
    """A target that does not exist; the message names it and what does exist."""


@functools.lru_cache(maxsize=64)
def _model(variant: Variant, seed: int) -> Any:
    """Building costs more than ten forwards; one model serves every policy, cache and example."""
    return variant.build(seed)


@functools.lru_cache(maxsize=64)
def _witnesses(variant: Variant, seed: int) -> Witnesses:
    return Witnesses(variant, _model(variant, seed))


@functools.lru_cache(maxsize=1)
def _probe() -> Probe:
    return Probe(HOOKS)


class ReferenceSession:
    """One CachePool with the caches of every sequence."""

    def __init__(self, target: ReferenceTarget, owners: tuple[Owner, ...]) -> None:
        self._model = _model(target.variant, target.weights_seed)
        self._policy = target.policy
        self._probe = _probe()
        self._pool = CachePool()
        self._ids = [self._pool.open(target.make_caches(self._model), owner) for owner in owners]
        self._prompts: list[Prompt | None] = [None] * len(owners)

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        caches = self._pool.forward_caches(self._ids[sequence])
        ids = mx.array([list(tokens)], dtype=mx.int32)
        logits, error = None, None
        if prompt is not None:  # outside the probe: the attention of a vision tower is not that of the cache
            try:
                self._prompts[sequence] = self._model.read(mx.array([prompt.tokens], mx.int32), images_of(prompt))
            except Exception as failure:  # as below
                return ForwardObservation(tuple(tokens), None, error=f"{type(failure).__name__}: {failure}")
        read = {} if (kept := self._prompts[sequence]) is None else {"prompt": kept}
        with self._probe.watching() as record:
            started = time.perf_counter()
            try:
                out = self._model(ids, list(caches), self._policy, **read)
                mx.eval(out)
                logits = np.array(out[0].astype(mx.float32))
            except Exception as failure:  # whatever a model raises is an observation, and the judges decide
                error = f"{type(failure).__name__}: {failure}"
            seconds = time.perf_counter() - started
        return ForwardObservation(tuple(tokens), logits, record.attention(), record.positions(), seconds, error)

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation:
        return self._removal(lambda: self._pool.trim_front(self._ids[sequence], n, keep).removed)

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        seen = self._removal(lambda: self._pool.rollback(self._ids[sequence], n).removed)
        prompt, offset = self._prompts[sequence], self._pool.forward_caches(self._ids[sequence])[0].offset
        if any(seen.removed) and prompt is not None and offset < prompt.length:
            self._prompts[sequence] = prompt.cut(offset) if offset else None
        return seen

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation:
        sequence = self._ids[rule.sequence]
        return self._removal(
            lambda: (
                enforce_max_kv_size(
                    self._pool, sequence, rule.limit, rule.generation, rule.keep, rule.n_discard
                ).trim.removed
            )
        )

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]:
        caches = self._pool.forward_caches(self._ids[sequence])
        return tuple(CacheLengths(cache.offset, cache.live_start, cache.live_len) for cache in caches)

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        caches = self._pool.forward_caches(self._ids[sequence])
        return tuple(CacheRows(*(_numbers(array) for array in cache.rows())) for cache in caches)

    @staticmethod
    def _removal(act: Any) -> RemovalObservation:
        try:
            return RemovalObservation(tuple(act()))
        except Exception as failure:  # as in forward
            return RemovalObservation(error=f"{type(failure).__name__}: {failure}")


@dataclasses.dataclass(frozen=True)
class ReferenceTarget:
    """One variant of one family, with a mask policy, a cache storage and a seed for the random weights.

    ``path``: ``images`` needs a variant with a vision tower and says that prompts may hold images.
    """

    variant: Variant
    policy: MaskPolicy = "live"
    storage: Storage = "rows"
    weights_seed: int = 0
    path: Path = "text"

    @functools.cached_property
    def identity(self) -> TargetIdentity:
        return TargetIdentity(
            kind=KIND,
            family=self.variant.family,
            variant=self.variant.name,
            policy=self.policy,
            storage=self.storage,
            weights_seed=self.weights_seed,
            detail=self.describe(),
            drawn=variant_to_json(self.variant) if self.variant.drawn else None,
            path=self.path,
        )

    @property
    def capabilities(self) -> frozenset[Capability]:
        return frozenset(Capability) - (frozenset() if self.path == "images" else {Capability.IMAGES})

    @functools.cached_property
    def images(self) -> ImageFormat | None:
        if self.path == "text":
            return None
        config = self.variant.config
        tower = _model(self.variant, self.weights_seed).visual
        return ImageFormat(
            config.image_token_id,
            config.video_token_id,
            tower.config.spatial_merge_size,
            tower.config.patch_pixels,
            tower.frames_apart,
        )

    @property
    def vocab_size(self) -> int:
        return int(self.variant.config.vocab_size)

    @functools.cached_property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(_model(self.variant, self.weights_seed).attention_layers)

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        whole = (None,) * len(self.attention_layers)
        return tuple(getattr(_model(self.variant, self.weights_seed), "windows", whole))

    def describe(self) -> dict[str, Any]:
        """The configuration and options, JSON-able."""
        return {"config": dataclasses.asdict(self.variant.config), "options": dict(self.variant.options)}

    def make_caches(self, model: Any) -> list[KVCache]:
        """Fresh caches for one sequence."""
        return cast(list[KVCache], model.make_caches(self.storage))

    def open(self, owners: tuple[Owner, ...]) -> ReferenceSession:
        return ReferenceSession(self, owners)

    def renew(self) -> None:
        _model.cache_clear()
        _witnesses.cache_clear()

    def counterpart(self) -> ReferenceTarget:
        return dataclasses.replace(self, policy="offset" if self.policy == "live" else "live")

    def witness(self, history: History) -> Expected:
        return _witnesses(self.variant, self.weights_seed).float64(history, self.storage)

    def cache_free(self, history: History) -> Expected:
        return _witnesses(self.variant, self.weights_seed).cache_free(history, self.storage)


def _numbers(array: mx.array | None) -> np.ndarray[Any, Any]:
    """float32 holds every float16 and bfloat16 value, so no difference is lost. Nothing held: no row."""
    return np.empty((1, 1, 0, 0), np.float32) if array is None else np.array(array.astype(mx.float32))


def targets(
    family: str,
    policy: MaskPolicy = "live",
    weights_seed: int = 0,
    path: Path = "text",
    drawn: Sequence[Variant] = (),
) -> tuple[ReferenceTarget, ...]:
    """Every variant x storage of a family on one path, simplest first; () for the images of a family without any. Then
    the ``drawn`` variants, with the storages in turn.

    Unknown family: UnknownFamily, with the nearest names.
    """
    pairs = [(variant, storage) for storage in STORAGES for variant in variants(family)]
    pairs += [(variant, STORAGES[number % len(STORAGES)]) for number, variant in enumerate(drawn)]
    return tuple(
        ReferenceTarget(variant, policy, storage, weights_seed, path)
        for variant, storage in pairs
        if path == "text" or variant.reads_images
    )


def paths(family: str) -> tuple[Path, ...]:
    """The paths on which a family can be run. Unknown family: UnknownFamily."""
    return tuple(path for path in PATHS if targets(family, path=path))


def limits(family: str, path: Path = "text") -> tuple[str, ...]:
    """What a run of the family on this path cannot show, one phrase each. Raises UnknownFamily."""
    other = ("no prompt holds an image: the path with images has a run and a report of its own",)
    return registry.limits(family) + (other if path == "text" and "images" in paths(family) else ())


def target_from_identity(data: object) -> ReferenceTarget:
    """Rebuild the target that a trace names. Raises TargetError (or UnknownFamily) with one line."""
    fields = ("kind", "family", "variant", "policy", "storage", "weights_seed")
    if not isinstance(data, dict) or set(data) - {"path", "drawn"} != set(fields):
        raise TargetError(
            f"a target must be an object with the fields {', '.join(fields)}; where not text, path; if drawn, drawn"
        )
    path = data.get("path", "text")
    if path not in PATHS:
        raise TargetError(f"a target's path is one of {', '.join(PATHS)}, got {path!r:.60}")
    names = [field for field in fields if field != "weights_seed"]
    if odd := [field for field in names if not isinstance(data[field], str)]:
        raise TargetError(f"a target's {odd[0]} must be text, got {data[odd[0]]!r:.60}")
    if data["kind"] != KIND:
        raise TargetError(f"unknown kind of target {data['kind']!r:.60}; this version knows {KIND!r}")
    known = {variant.name: variant for variant in variants(data["family"])}
    if "drawn" in data:
        try:
            known[data["variant"]] = read_variant(data["family"], data["variant"], data["drawn"])
        except ConfigError as error:
            raise TargetError(f"the variant {data['variant']!r:.60} cannot be built: {error}") from error
    if data["variant"] not in known:
        raise TargetError(f"{data['family']} has no variant {data['variant']!r:.60}; it has {', '.join(known)}")
    if data["policy"] not in POLICIES or data["storage"] not in STORAGES:
        raise TargetError(f"policy is one of {', '.join(POLICIES)} and storage one of {', '.join(STORAGES)}")
    seed = data["weights_seed"]
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise TargetError(f"weights_seed must be a whole number in [0, 2**32), got {seed!r:.60}")
    if path == "images" and not known[data["variant"]].reads_images:
        raise TargetError(f"the variant {data['variant']} of {data['family']} has no vision tower, so no path images")
    return ReferenceTarget(known[data["variant"]], data["policy"], data["storage"], seed, path)


def use_device(name: str) -> None:
    """Make ``cpu`` or ``gpu`` the device of everything that follows. TargetError when MLX has no such device here."""
    chosen = {"cpu": mx.cpu, "gpu": mx.gpu}.get(name)
    if chosen is None:
        raise TargetError(f"the device is cpu or gpu, not {name!r:.40}")
    if not mx.is_available(chosen):
        raise TargetError(f"MLX has no {name} here; leave the device out, or install another build of MLX")
    mx.set_default_device(chosen)


def device() -> str:
    """Where the reference models run and in which precision, for reports."""
    return f"{mx.default_device()}, float32 weights"


__all__ = [
    "FAMILIES",
    "ReferenceTarget",
    "TargetError",
    "UnknownFamily",
    "device",
    "drawn_variants",
    "limits",
    "target_from_identity",
    "targets",
]
