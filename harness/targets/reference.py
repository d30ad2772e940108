"""The reference target: the families of ``reference_models`` on the reference engine."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast, get_args

from harness.operations import Owner
from harness.oracle import Expected, History
from harness.rules import CacheRule, fits
from harness.seeds import derive_seed
from harness.target import Capability, ImageFormat, Path, TargetIdentity
from harness.targets.device import device, use_device
from harness.targets.naming import Asked, Subject, TargetError
from harness.targets.reference_caches import CACHES, FAR, KINDS, STORAGES
from harness.targets.reference_session import ReferenceSession
from harness.targets.witnesses import Witnesses
from reference_models import registry
from reference_models.drawn import drawn_variants, read_variant, variant_to_json
from reference_models.engine import BlockPool, KVCache, MaskPolicy, PagedKVCache, row_widths
from reference_models.hf import ConfigError
from reference_models.registry import FAMILIES, UnknownFamily, Variant, variants

KIND = "reference"
POLICIES: tuple[MaskPolicy, ...] = get_args(MaskPolicy)
PATHS: tuple[Path, ...] = get_args(Path)


@functools.lru_cache(maxsize=64)
def _model(variant: Variant, seed: int) -> Any:
    """Building costs more than ten forwards; one model serves every policy, cache and example."""
    return variant.build(seed)


@functools.lru_cache(maxsize=64)
def _widths(variant: Variant, seed: int) -> tuple[tuple[int, int], ...]:
    return row_widths(_model(variant, seed))


@functools.lru_cache(maxsize=64)
def _witnesses(variant: Variant, seed: int, rules: tuple[CacheRule | None, ...]) -> Witnesses:
    return Witnesses(variant, _model(variant, seed), rules)


@dataclasses.dataclass(frozen=True)
class ReferenceTarget:
    """One variant of one family, with a mask policy, caches (by their name in CACHES) and a seed for random weights.

    ``path``: ``images`` needs a variant with a vision tower and says that prompts may hold images.
    """

    variant: Variant
    policy: MaskPolicy = "live"
    storage: str = "rows"
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

    @functools.cached_property
    def capabilities(self) -> frozenset[Capability]:
        lacks = {Capability.UNPADDED} | (set() if self.path == "images" else {Capability.IMAGES})
        if not getattr(self.variant.config, "rotates", True):
            lacks.add(Capability.POSITIONS)
        return frozenset(Capability) - lacks

    @property
    def far(self) -> bool:
        """Is it judged by programs that are far from small alone?"""
        return self.storage in FAR

    @property
    def turns_by_mrope(self) -> bool:
        """Do its positions have three ids each?"""
        return hasattr(getattr(self.variant.config, "rope_scaling", None), "mrope_section")

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

    @functools.cached_property
    def rules(self) -> tuple[CacheRule | None, ...]:
        spec = CACHES[self.storage]
        if spec.kind == "chunked":
            return (CacheRule(chunk=spec.chunk),) * len(self.attention_layers)
        windows = [spec.window or window if spec.kind == "rotating" else None for window in self.windows]
        return tuple(None if window is None else CacheRule(window, spec.sinks) for window in windows)

    @property
    def row_storage(self) -> str:
        return CACHES[self.storage].storage

    @property
    def row_widths(self) -> tuple[tuple[int, int], ...]:
        return _widths(self.variant, self.weights_seed)

    def describe(self) -> dict[str, Any]:
        """The configuration and options, JSON-able."""
        return {"config": dataclasses.asdict(self.variant.config), "options": dict(self.variant.options)}

    def make_caches(self, model: Any) -> list[KVCache]:
        """Fresh caches for one sequence."""
        return cast(list[KVCache], model.make_caches(CACHES[self.storage]))

    def open(self, owners: tuple[Owner, ...]) -> ReferenceSession:
        model = _model(self.variant, self.weights_seed)
        return ReferenceSession(model, self.policy, self._maker(model), owners, self.row_widths)

    def _maker(self, model: Any) -> Callable[[], list[KVCache]]:
        spec = CACHES[self.storage]
        if spec.kind == "paged" and spec.block is not None:  # all sequences take their blocks from the same pools
            pools = [BlockPool(spec.block, spec.storage) for _ in self.attention_layers]
            return lambda: [PagedKVCache(pool) for pool in pools]
        return lambda: self.make_caches(model)

    def renew(self) -> None:
        _model.cache_clear()
        _witnesses.cache_clear()

    def counterpart(self) -> ReferenceTarget:
        return dataclasses.replace(self, policy="offset" if self.policy == "live" else "live")

    def witness(self, history: History) -> Expected:
        return self._witnesses.float64(history)

    def cache_free(self, history: History) -> Expected:
        return self._witnesses.cache_free(history)

    @property
    def _witnesses(self) -> Witnesses:
        return _witnesses(self.variant, self.weights_seed, self.rules)


def targets(
    family: str,
    policy: MaskPolicy = "live",
    weights_seed: int = 0,
    path: Path = "text",
    drawn: Sequence[Variant] = (),
    far: bool = False,
) -> tuple[ReferenceTarget, ...]:
    """Every variant x storage of a family on one path, simplest first; () for the images of a family without any. Then
    the other kinds of caches, each with the simplest variant of several layers that it fits, the ``drawn`` variants
    with the storages in turn, and on text, where ``far``, the kinds that are too wide for small programs.

    Unknown family: UnknownFamily, with the nearest names.
    """
    pairs = [(variant, storage) for storage in STORAGES for variant in variants(family)]
    pairs += [(variant, kind) for kind in KINDS if (variant := _shows(family, kind, path)) is not None]
    pairs += [(variant, STORAGES[number % len(STORAGES)]) for number, variant in enumerate(drawn)]
    wide = FAR if far and path == "text" else ()
    pairs += [(variant, kind) for kind in wide if (variant := _shows(family, kind, path)) is not None]
    return tuple(
        ReferenceTarget(variant, policy, storage, weights_seed, path)
        for variant, storage in pairs
        if path == "text" or variant.reads_images
    )


@functools.cache
def _shows(family: str, kind: str, path: Path) -> Variant | None:
    """The variant that shows a kind of caches; its rows must fit them."""
    for variant in variants(family):
        if path == "images" and not variant.reads_images:
            continue
        target = ReferenceTarget(variant, storage=kind)
        affine = target.row_storage.startswith("affine")
        if len(target.attention_layers) > 1 and _fits(target) and (affine or _rotates(target) == any(target.windows)):
            return variant
    return None


def _rotates(target: ReferenceTarget) -> bool:
    """In the windows of its layers?"""
    return target.storage == "rotating-layers"


def _fits(target: ReferenceTarget) -> bool:
    """Can caches of this storage hold the rows of this variant?"""
    storage = target.row_storage
    if storage.startswith("affine"):
        return all(fits(storage, width) for both in target.row_widths for width in both)
    # A layer with a window of its own, on a ring of another width, is what no run judges.
    return CACHES[target.storage].kind != "rotating" or _rotates(target) == any(target.windows)


def paths(family: str) -> tuple[Path, ...]:
    """The paths on which a family can be run. Unknown family: UnknownFamily."""
    return tuple(path for path in PATHS if targets(family, path=path))


def limits(family: str, path: Path = "text") -> tuple[str, ...]:
    """What a run of the family on this path cannot show, one phrase each. Raises UnknownFamily."""
    other = ""
    if path == "images":
        other = (
            "images come with the first forward of a sequence only; they have at most 9 x 9 tokens, videos at most 6 "
            "frames, a prompt at most five of them"
        )
    elif "images" in paths(family):
        other = "no prompt holds an image: the path with images has a run and a report of its own"
    return registry.limits(family) + ((other,) if other else ())


def subject(rest: str, asked: Asked) -> Subject:
    """``FAMILY``, its images path ``FAMILY+images``, or one configuration of it, ``FAMILY:VARIANT[:STORAGE]``."""
    name, *parts = rest.split(":")
    family, plus, path = name.partition("+")
    if plus and path not in PATHS:
        raise TargetError(f"a path is one of {', '.join(PATHS)}, not {path!r:.40}")
    on = cast(Path, path or "text")
    try:
        if on not in paths(family):
            raise TargetError(f"{family} has no path with images: no model with a vision tower")
        numbers = derive_seed(asked.seed, family, on, "configurations")
        drawn = drawn_variants(family, numbers, asked.configurations, images=on == "images")
        found = targets(family, asked.policy, asked.seed, on, () if parts else drawn, asked.far or bool(parts))
    except UnknownFamily as error:
        raise TargetError(str(error)) from error
    if parts:
        known = ", ".join(dict.fromkeys(target.variant.name for target in found))
        found = tuple(target for target in found if [target.variant.name, target.storage][: len(parts)] == parts)
        if not found:
            raise TargetError(
                f"{family} has nothing called {':'.join(parts)!r:.80}; its variants are {known}, the storages behind "
                f"another colon {', '.join(CACHES)}"
            )
    return Subject(KIND, family, found, device(), on, limits(family, on))


def target_from_identity(data: object, asked: Asked | None = None) -> ReferenceTarget:
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
    if data["policy"] not in POLICIES or data["storage"] not in CACHES:
        raise TargetError(f"policy is one of {', '.join(POLICIES)} and storage one of {', '.join(CACHES)}")
    seed = data["weights_seed"]
    if type(seed) is not int or not 0 <= seed < 2**32:
        raise TargetError(f"weights_seed must be a whole number in [0, 2**32), got {seed!r:.60}")
    if path == "images" and not known[data["variant"]].reads_images:
        raise TargetError(f"the variant {data['variant']} of {data['family']} has no vision tower, so no path images")
    target = ReferenceTarget(known[data["variant"]], data["policy"], data["storage"], seed, path)
    if not _fits(target):
        raise TargetError(f"the variant {data['variant']} of {data['family']} does not fit {data['storage']} caches")
    return target


__all__ = [
    "CACHES",
    "FAMILIES",
    "ReferenceTarget",
    "TargetError",
    "UnknownFamily",
    "device",
    "drawn_variants",
    "limits",
    "target_from_identity",
    "targets",
    "use_device",
]
