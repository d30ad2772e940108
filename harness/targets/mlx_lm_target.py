"""A model of mlx-lm as a target, drawn by a seed or of a checkpoint, on the library's own caches or on ours."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import mlx.core as mx

from harness.operations import Owner
from harness.oracle import Expected, History
from harness.rules import CacheRule
from harness.target import Capability, ImageFormat, Session, TargetIdentity
from harness.targets import mlx_lm_caches as held
from harness.targets import mlx_lm_quantised as quantised
from harness.targets import mlx_lm_release as release
from harness.targets.mlx_lm_catalogue import Family
from harness.targets.mlx_lm_checkpoints import Checkpoint, load
from harness.targets.mlx_lm_free import cache_free
from harness.targets.mlx_lm_live import GivenMask, LiveSession, LiveWindow, StatefulKVCache
from harness.targets.mlx_lm_models import Bounded, UnknownFamily, build, library, variants, version
from harness.targets.mlx_lm_session import Library, LibrarySession, probe
from reference_models.engine import KVCache, MaskPolicy

KIND = "mlx_lm"
OWN, LIVE_WINDOW, BOUNDED = "", "live-window", "max-kv-size="
"""Whose caches: what stands behind the @ of a name; a number of keys behind the last."""

#: What it holds as a whole is said of no session: in one on the library's caches everything that keeps them is ours,
#: and one on caches of ours has states beside them, which are no keys and no values.
_NEVER = frozenset({Capability.IMAGES, Capability.WITNESS, Capability.INT8, Capability.UNPADDED, Capability.FOOTPRINT})
_OURS_ALONE = frozenset(
    {
        Capability.FRONT_TRIM,
        Capability.ENFORCE,
        Capability.OWNERSHIP,
        Capability.COUNTERPART,
        Capability.ARGUMENTS,
        Capability.BYTES,
    }
)


@dataclasses.dataclass(frozen=True)
class MlxLmTarget:
    """One family of mlx-lm. ``caches``: OWN, LIVE_WINDOW, or BOUNDED and the ``max_kv_size`` that the library is asked
    for; ``policy``: of the masks of LIVE_WINDOW; ``checkpoint``: where its weights lie, None of one whose weights
    ``weights_seed`` draws; ``variant`` is then the folder's name."""

    model_type: str
    variant: str = "tiny"
    caches: str = OWN
    policy: MaskPolicy = "live"
    weights_seed: int = 0
    checkpoint: Checkpoint | None = None

    @property
    def family(self) -> Family:
        if self.checkpoint is not None:
            return load(self.checkpoint).family
        return next(family for family in variants(self.model_type) if family.variant == self.variant)

    @property
    def ours(self) -> bool:
        """Are the caches ours, and not the library's?"""
        return self.caches == LIVE_WINDOW

    @property
    def max_kv_size(self) -> int | None:
        """What the library is asked for, where it is."""
        bound = self.caches.rpartition("@")[2]
        return int(bound.removeprefix(BOUNDED)) if bound.startswith(BOUNDED) else None

    @property
    def _library(self) -> Library:
        return library() if self.max_kv_size is None else Bounded(self.max_kv_size)

    @functools.cached_property
    def identity(self) -> TargetIdentity:
        from_file = None if self.checkpoint is None else dataclasses.asdict(self.checkpoint)
        return TargetIdentity(
            kind=KIND,
            family=self.model_type,
            variant=f"{self.variant}@{self.caches}" if self.caches else self.variant,
            policy=self.policy if self.ours else "library",
            storage="rows",
            weights_seed=self.weights_seed,
            detail={"config": self.family.config, "options": from_file or {}, "mlx-lm": version()},
            checkpoint=from_file,
        )

    @property
    def _model(self) -> Any:
        if self.checkpoint is not None:
            return load(self.checkpoint).model
        return build(self.model_type, self.variant, self.weights_seed)

    @functools.cached_property
    def _leaves(self) -> tuple[tuple[int, Any], ...]:
        """Fresh caches of a sequence, by layer."""
        return tuple(held.leaves(self._library.make_prompt_cache(self._model)))

    @property
    def fresh_caches(self) -> tuple[Any, ...]:
        """What ``make_prompt_cache`` makes for a sequence, those of a CacheList one by one."""
        return tuple(cache for _, cache in self._leaves)

    @property
    def makes_caches(self) -> bool:
        """Does the model say itself which caches it wants?"""
        return hasattr(self._model, "make_cache")

    @property
    def trims_itself(self) -> bool:
        """Do its caches drop their fronts by themselves, and say where they begin?"""
        return any(held.kind_of(cache) == "chunked" for cache in self.fresh_caches)

    @functools.cached_property
    def _with_keys(self) -> tuple[int, ...]:
        """Which of them have keys."""
        return tuple(at for at, (_, cache) in enumerate(self._leaves) if not held.is_state(cache))

    @functools.cached_property
    def _calls(self) -> tuple[tuple[int, int], ...]:
        """Layer and leaf of every attention call."""
        if self.family.calls:
            return tuple((layer, self._with_keys[number]) for layer, number in self.family.calls)
        return tuple((self._leaves[at][0], at) for at in self._with_keys)

    @functools.cached_property
    def _read(self) -> tuple[int, ...]:
        """The leaves that attention reads. nemotron_nas has caches that nobody does."""
        return tuple(sorted({at for _, at in self._calls}))

    @property
    def has_keys(self) -> bool:
        """Is there a layer whose cache has keys?"""
        return bool(self._with_keys)

    @property
    def has_states(self) -> bool:
        """Are there layers whose cache has no keys?"""
        return len(self._with_keys) < len(self._leaves)

    @functools.cached_property
    def capabilities(self) -> frozenset[Capability]:
        lacks = set(_NEVER)
        kinds = {held.kind_of(cache) for _, cache in self._leaves}
        if not self.ours:
            lacks |= _OURS_ALONE
            if self.quantises or not release.batches(self._library.make_prompt_cache(self._model)):
                lacks |= {Capability.BATCH}  # the library merges no quantised caches
            if not self.quantises:
                lacks |= {Capability.QUANTISE}
        else:
            lacks |= {Capability.QUANTISE}
            if "state" in kinds:  # nothing trims a state, so what it still knows of trimmed tokens no oracle can say
                lacks |= {Capability.ROLLBACK, Capability.SAVE_LOAD, Capability.BATCH, Capability.CACHE_FREE}
            if len(self._calls) != len(self._read):
                lacks |= {Capability.BATCH}
        if not self._first_forward[1]:
            lacks.add(Capability.POSITIONS)
        return frozenset(Capability) - lacks

    @functools.cached_property
    def quantises(self) -> bool:
        """Are its caches the library's, dense, and their rows whole groups? Rotating ones refuse, those in a CacheList
        are passed over; a checkpoint is given batches, which no quantised caches can be in."""
        make = functools.partial(self._library.make_prompt_cache, self._model)
        dense = all(type(cache).__name__ == "KVCache" for cache in make())
        if self.caches != OWN or self.checkpoint is not None or not dense:
            return False
        return len(self._calls) == len(self._leaves) and quantised.fit(self._model, make)

    @property
    def calls(self) -> int:
        """Attention calls of a forward. UnknownFamily where the configuration names caches that there are not."""
        if any(number >= len(self._with_keys) for _, number in self.family.calls):
            raise UnknownFamily(
                f"mlx_lm:{self.model_type}: calls names a cache beyond the {len(self._with_keys)} with keys"
            )
        return len(self._calls)

    def first_forward(self) -> tuple[int, int]:
        """How many calls of attention and of a rotation a forward makes. Raises what the model raises."""
        return self._first_forward

    @functools.cached_property
    def _first_forward(self) -> tuple[int, int]:
        """How many calls of attention and of a rotation the probe sees in a forward on the library's own caches."""
        with probe().watching() as record:
            mx.eval(self._model(mx.array([[1, 2]]), cache=self._library.make_prompt_cache(self._model)))
        return len(record.attention()), len(record.positions())

    @property
    def images(self) -> ImageFormat | None:
        return None

    @property
    def vocab_size(self) -> int:
        config = self.family.config
        return int(config.get("text_config", config)["vocab_size"])

    @functools.cached_property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, _ in self._calls)

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        return self.family.windows or (None,) * len(self._calls)

    @functools.cached_property
    def rules(self) -> tuple[CacheRule | None, ...]:
        if self.ours:
            return (None,) * len(self._calls)
        rules = [held.rule_of(self._leaves[at][1]) for _, at in self._calls]
        if self.has_states:
            rules = [dataclasses.replace(rule or CacheRule(), states=True) for rule in rules]
        return tuple(rules)

    @property
    def row_storage(self) -> str:
        return "rows"

    @property
    def row_widths(self) -> tuple[tuple[int, int], ...]:
        return tuple(quantised.widths(self._model, lambda: self._library.make_prompt_cache(self._model)))

    def open(self, owners: tuple[Owner, ...]) -> Session:
        leaves = [at for _, at in self._calls]
        if not self.ours:
            return LibrarySession(self._model, self._library, leaves, owners)
        ours = [self._read.index(at) for at in leaves]
        return LiveSession(_OnOurCaches(self), self.policy, self._our_caches, owners, ours)

    def _our_caches(self) -> list[KVCache]:
        """One for every cache of the library that attention reads; states, if any, go with the first."""
        caches: list[KVCache] = [KVCache() for _ in self._read]
        states = [
            cache for _, cache in held.leaves(self._library.make_prompt_cache(self._model)) if held.is_state(cache)
        ]
        if states:
            caches[0] = StatefulKVCache(states)
        return caches

    def renew(self) -> None:
        build.cache_clear()
        load.cache_clear()
        for name in ("_leaves", "_first_forward", "quantises"):
            self.__dict__.pop(name, None)

    def counterpart(self) -> MlxLmTarget | None:
        if not self.ours:
            return None
        return dataclasses.replace(self, policy="offset" if self.policy == "live" else "live")

    def witness(self, history: History) -> Expected:  # asked with WITNESS only, which is in _NEVER
        raise NotImplementedError("no independent witness of mlx-lm's families in float64 is asked here")

    def cache_free(self, history: History) -> Expected:
        """The model without a cache where it alone hides keys, else with the oracle's masks in the place of caches."""
        return cache_free(history, self._alone if self.caches == OWN else self._with_masks)

    def _alone(self, tokens: mx.array, shown: Any, offset: int, storage: str) -> mx.array:
        if storage != "rows":
            return self._with_masks(tokens, shown, offset, storage)
        out: mx.array = self._model(tokens, cache=None)
        return out

    def _with_masks(self, tokens: mx.array, shown: Any, offset: int, storage: str) -> mx.array:
        if self.max_kv_size is not None:  # the caches of all layers are alike
            rule = held.rule_of(self.fresh_caches[self._with_keys[0]])
            given = {at: GivenMask(lambda window: shown(window, rule), offset, None) for at in self._with_keys}
        else:
            given = {at: GivenMask(shown, offset, self.window_of(at), storage) for at in self._with_keys}
        out: mx.array = self._model(tokens, cache=self._shaped(given))
        return out

    def window_of(self, leaf: int) -> int | None:
        """Of a cache of the library: the window in which it rotates."""
        cache = self._leaves[leaf][1]
        return int(cache.max_size) if held.kind_of(cache) == "rotating" else None

    def _shaped(self, given: dict[int, Any]) -> list[Any]:
        """A prompt cache of the shape that the model wants, with these leaves."""
        made = self._library.make_prompt_cache(self._model)
        at = 0
        for index, cache in enumerate(made):
            inside = getattr(cache, "caches", None)
            if inside is None:
                made[index] = given.get(at, cache)
                at += 1
                continue
            cache.caches = tuple(given.get(at + number, leaf) for number, leaf in enumerate(inside))
            at += len(inside)
        return made


class _OnOurCaches:
    """A model as ``ReferenceSession`` calls one: tokens, our caches, and where masks come from."""

    def __init__(self, target: MlxLmTarget) -> None:
        self._target = target

    def __call__(self, tokens: mx.array, caches: list[Any], policy: MaskPolicy) -> mx.array:
        target = self._target
        ours: dict[int, Any] = {at: KVCache() for at in target._with_keys}  # nobody writes into one that none reads
        ours |= dict(zip(target._read, caches, strict=True))
        given: dict[int, Any] = {at: LiveWindow(cache, policy, target.window_of(at)) for at, cache in ours.items()}
        if target.has_states:
            states = iter(caches[0].states)
            given |= {at: next(states) for at, (_, cache) in enumerate(target._leaves) if held.is_state(cache)}
        out: mx.array = target._model(tokens, cache=target._shaped(given))
        return out
