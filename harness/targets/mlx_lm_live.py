"""Our caches in the shape that the models of mlx-lm want, so that their fronts can be trimmed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from harness.operations import EnforceMaxKvSize, Owner
from harness.target import CacheLengths, CacheMemory, CacheRows, RemovalObservation
from harness.targets.mlx_lm_quantised import read_back
from harness.targets.reference_session import ReferenceSession
from reference_models.engine import KVCache, MaskPolicy, masks


class LiveWindow:
    """Our cache as the models of mlx-lm want one: its front can be trimmed, and they go on asking it for masks.

    ``policy``: where the key axis of those masks comes from; ``offset`` is what the library's own caches do.
    ``window``: of the rotating cache that this one stands for, which is what masks are cut to where a model does not
    name a window. Also stands for a batch of sequences.
    """

    def __init__(self, cache: Any, policy: MaskPolicy, window: int | None) -> None:
        self._cache, self._policy, self._window = cache, policy, window

    @property
    def offset(self) -> Any:
        """Absolute position of the next token; int32 ``[B]`` of a batch, as RoPE wants it."""
        offset = self._cache.offset
        return offset.reshape(-1) if isinstance(offset, mx.array) else offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        fetched: tuple[mx.array, mx.array] = self._cache.update_and_fetch(keys, values)
        return fetched

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All that is held, for a layer that attends to the keys of another."""
        held: tuple[mx.array, mx.array] = self._cache.rows()
        return held

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array | None:
        """For N new tokens, over the keys that they will be given; always an array where anything is hidden."""
        return masks.mask_for(N, self._cache, self._policy, window_size or self._window)

    @property
    def state(self) -> tuple[Any, Any]:
        keys, values = self._cache.rows()
        return keys, values

    def size(self) -> int:
        return int(self._cache.live_len)

    def empty(self) -> bool:
        return self._cache.rows()[0] is None


class StatefulKVCache(KVCache):
    """The first cache of a sequence of a recurrent model: the states of the other layers are copied with it."""

    def __init__(self, states: Sequence[Any] = ()) -> None:
        super().__init__()
        self.states = list(states)
        self._fresh_states = [type(state)(len(state.cache)) for state in states]

    def reset(self) -> None:
        super().reset()
        self.states = [type(state)(len(state.cache)) for state in self._fresh_states]


class GivenMask:
    """In place of a cache, for one forward over a whole sequence: it hands back what it is given, and the masks of the
    oracle: ``shown(window)``, bool [S, S], or [S, 2 S] where the rows come a second time, as a cache of this
    ``storage`` would read them. ``offset``: position of the first token."""

    def __init__(self, shown: Any, offset: int, window: int | None, storage: str = "rows") -> None:
        self._shown, self.offset, self._window, self._storage = shown, offset, window, storage
        self._rows: tuple[mx.array, mx.array] | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        if self._storage != "rows":
            sides = [mx.concatenate([side, read_back(side, self._storage)], axis=2) for side in (keys, values)]
            keys, values = sides
        self._rows = keys, values
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        assert self._rows is not None
        return self._rows

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None) -> mx.array:
        return mx.array(self._shown(window_size or self._window))


class LiveSession(ReferenceSession):
    """``calls``: which of the caches of a sequence every attention call of a forward reads. A layer may attend to the
    keys of another, and a cache may be nobody's: what is told goes by calls."""

    def __init__(
        self,
        model: Any,
        policy: MaskPolicy,
        make_caches: Callable[[], list[KVCache]],
        owners: tuple[Owner, ...],
        calls: Sequence[int],
    ) -> None:
        super().__init__(model, policy, make_caches, owners)
        self._calls = tuple(calls)

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]:
        told = super().lengths(sequence)
        return tuple(told[at] for at in self._calls)

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        told = super().rows(sequence)
        return tuple(told[at] for at in self._calls)

    def memory(self, sequence: int) -> tuple[CacheMemory, ...]:
        told = super().memory(sequence)
        return tuple(told[at] for at in self._calls) if told else ()

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation:
        return self._by_call(super().trim_front(sequence, n, keep))

    def rollback(self, sequence: int, n: int) -> RemovalObservation:
        return self._by_call(super().rollback(sequence, n))

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation:
        return self._by_call(super().enforce(rule))

    def _by_call(self, seen: RemovalObservation) -> RemovalObservation:
        if not seen.removed:
            return seen
        return RemovalObservation(tuple(seen.removed[at] for at in self._calls), seen.error, seen.refused)
