"""The boundary between the harness and whatever it judges: Target, Session and what a Session reports.

A Session acts and reports; it never asserts and never compares.  Everything that crosses this boundary is a plain
Python value or a NumPy array, so the judging side needs no MLX and a target may live in another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from harness.calls import ArgumentChange as ArgumentChange
from harness.calls import ArgumentsObservation as ArgumentsObservation
from harness.calls import AttentionCall as AttentionCall
from harness.calls import AttentionKind as AttentionKind
from harness.calls import AttentionValues as AttentionValues
from harness.calls import MaskKind as MaskKind
from harness.calls import PositionCall as PositionCall
from harness.capability import Capability as Capability
from harness.operations import EnforceMaxKvSize, Owner
from harness.rules import CacheRule, QuantisedStorage

if TYPE_CHECKING:
    from harness.oracle import Expected, History

Path = Literal["text", "images"]
"""What the prompts of a campaign hold. A bug can live in the one and not in the other."""


@dataclass(frozen=True)
class ImageFormat:
    """How a target wants its images: the ids of the tokens that stand for them, ``merge`` x ``merge`` patches to a
    token, ``patch_pixels`` numbers to a patch; ``frames_apart``: a text token lies between the frames of a video.
    ``start_token``: what must stand in front of each of their grids, so that none stands at position 0; None: nothing
    need."""

    image_token: int
    video_token: int
    merge: int
    patch_pixels: int
    frames_apart: bool
    start_token: int | None = None


@dataclass(frozen=True, eq=False)
class PromptInput:
    """A prompt with images, to be looked at once.

    ``tokens``: all of it. ``pixel_values``, ``pixel_values_videos``: float32 [patches, patch_pixels], flattened as the
    processors of the published models do; ``image_grid_thw``, ``video_grid_thw``: [n, 3], in patches. None without
    any of the kind.
    """

    tokens: tuple[int, ...]
    pixel_values: np.ndarray[Any, Any] | None
    image_grid_thw: np.ndarray[Any, Any] | None
    pixel_values_videos: np.ndarray[Any, Any] | None
    video_grid_thw: np.ndarray[Any, Any] | None


@dataclass(frozen=True)
class ForwardObservation:
    """One forward: ``logits`` [l, vocab] (None if it raised), the calls the probe saw, seconds in the model, and the
    error as ``Type: message``. ``given``: the rows of its tokens as every cache was given them, [1, H, l, D], where the
    caches are quantised and the target has the capability QUANTISE; else ()."""

    tokens: tuple[int, ...]
    logits: np.ndarray[Any, Any] | None
    attention: tuple[AttentionCall, ...] = ()
    positions: tuple[PositionCall, ...] = ()
    seconds: float = 0.0
    error: str | None = None
    given: tuple[CacheRows, ...] = ()


@dataclass(frozen=True)
class RemovalObservation:
    """What a trim or rollback reports: the number removed from each cache that it visited (empty: it visited none).
    ``refused``: why it did nothing at all, in the target's words; no error, where a cache cannot do it."""

    removed: tuple[int, ...] = ()
    error: str | None = None
    refused: str | None = None


@dataclass(frozen=True)
class CopyObservation:
    """What an operation on the whole state of a sequence reports: how many caches it copied, wrote or emptied.
    ``refused``: why it did nothing, as in ``RemovalObservation``."""

    caches: int = 0
    error: str | None = None
    refused: str | None = None


@dataclass(frozen=True)
class CacheMemory:
    """Bytes that the buffers of one cache hold (keys, values, scales), used or not, and those of one slot of them (0
    without buffers)."""

    held: int
    per_slot: int


@dataclass(frozen=True)
class CacheLengths:
    """What one cache says of itself."""

    offset: int
    live_start: int
    live_len: int


@dataclass(frozen=True)
class CacheRows:
    """What one cache holds, by ascending position: keys and values as attention would get them, [B, H, n, D].

    ``positions`` [n]: where they stand, as the cache itself says; one with a rule may hold more than is seen and less
    than the others. None where it cannot tell: then they are taken for those of the ledger.
    """

    keys: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]
    positions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TargetIdentity:
    """Which thing is judged. ``detail`` is the JSON-able rest (configuration, options), to read. ``drawn``: all that
    rebuilds a variant which was drawn and whose name says nothing; else None. ``command``: what starts the process
    that it is in; None for a target in this process. ``checkpoint``: ``path`` of the folder and ``fingerprint`` of what
    lies in it, where its weights are not drawn."""

    kind: str
    family: str
    variant: str
    policy: str
    storage: str
    weights_seed: int
    detail: dict[str, Any] = field(default_factory=dict, compare=False)
    drawn: dict[str, Any] | None = field(default=None, hash=False)
    path: Path = "text"
    command: str | None = None
    checkpoint: dict[str, str] | None = field(default=None, hash=False)

    @property
    def name(self) -> str:
        """``reference/qwen2_vl@offset-mask`` or, with images, ``reference/qwen2_vl+images@offset-mask``."""
        path = "" if self.path == "text" else f"+{self.path}"
        return f"{self.kind}/{self.family}{path}@{self.policy}-mask"

    @property
    def full_name(self) -> str:
        weights = f"seed {self.weights_seed}" if self.checkpoint is None else f"of {self.checkpoint['path']}"
        return f"{self.name} variant {self.variant}, {self.storage} cache, weights {weights}"

    def to_json(self) -> dict[str, Any]:
        """What a trace keeps of it; the field ``path`` only where it is not the text path."""
        path = {} if self.path == "text" else {"path": self.path}
        named = path | {
            "kind": self.kind,
            "family": self.family,
            "variant": self.variant,
            "policy": self.policy,
            "storage": self.storage,
            "weights_seed": self.weights_seed,
        }
        named |= {} if self.command is None else {"command": self.command}
        named |= {} if self.checkpoint is None else {"checkpoint": self.checkpoint}
        return named if self.drawn is None else named | {"drawn": self.drawn}


class EngineGone(Exception):
    """A session cannot tell, or not any more, what its caches hold: the engine behind it is gone."""


class Session(Protocol):
    """One pool of sequences, fresh when opened. Model errors come back as ``error``; only a misuse raises, and
    EngineGone what tells of caches (``lengths``, ``rows``, ``memory``, ``arguments``).

    A method whose capability the target lacks is never called. On a model-owned sequence trims and copies do nothing.
    """

    def forward(self, sequence: int, tokens: Sequence[int], prompt: PromptInput | None = None) -> ForwardObservation:
        """``prompt``: given once, in the first forward of a sequence; ``tokens`` are the first of its tokens."""
        ...

    def trim_front(self, sequence: int, n: int, keep: int) -> RemovalObservation: ...

    def rollback(self, sequence: int, n: int) -> RemovalObservation: ...

    def enforce(self, rule: EnforceMaxKvSize) -> RemovalObservation: ...

    def lengths(self, sequence: int) -> tuple[CacheLengths, ...]: ...

    def rows(self, sequence: int) -> tuple[CacheRows, ...]:
        """One per cache; () from a target without the capability ROWS."""
        ...

    def snapshot(self, sequence: int, slot: int) -> CopyObservation:
        """Copy all that the sequence holds, its prompt included, into a slot (0 to 3); what was there is gone."""
        ...

    def restore(self, sequence: int, slot: int) -> CopyObservation:
        """The sequence takes over a copy of what the slot holds; from an empty slot nothing."""
        ...

    def fork(self, sequence: int, into: int) -> CopyObservation:
        """The sequence ``into`` takes over a copy of what ``sequence`` holds."""
        ...

    def save_and_load(self, sequence: int) -> CopyObservation:
        """The caches of the sequence go through a file."""
        ...

    def reset(self, sequence: int) -> CopyObservation:
        """The sequence starts again from nothing and holds no memory."""
        ...

    def quantise(self, sequence: int, storage: QuantisedStorage) -> CopyObservation:
        """The caches of the sequence store their rows so from now on, or all refuse. Capability QUANTISE."""
        ...

    def batch(self, rows: tuple[int, ...]) -> CopyObservation:
        """From now on these sequences are the batch: those that are in it stay, in this order, the others join behind
        them, who is not named goes on by itself. Capability BATCH."""
        ...

    def forward_batch(self, tokens: Sequence[Sequence[int]]) -> tuple[ForwardObservation, ...]:
        """One forward of the batch, with the tokens of each row; what each row saw (``harness.rows_of_a_batch`` takes
        a forward apart). After an error all rows have it."""
        ...

    def tell_attention(self) -> None:
        """From now on attention calls come with their ``values``. Capability ATTENTION_VALUES."""
        ...

    def watch_arguments(self) -> None:
        """From now on ``arguments`` has something to say. Capability ARGUMENTS."""
        ...

    def arguments(self) -> ArgumentsObservation:
        """Which arrays that were given to forwards, or given out by caches, have been written into since this was
        asked last (or since ``watch_arguments``)."""
        ...

    def memory(self, sequence: int) -> tuple[CacheMemory, ...]:
        """One per cache: in a batch the share of the sequence, or () where nobody can tell it; capability BYTES."""
        ...

    def footprint(self) -> int:
        """Bytes of keys and values that the engine keeps alive, whoever has them: measured. Capability FOOTPRINT."""
        ...


class Target(Protocol):
    """Something that can be opened again and again, with the same weights every time."""

    @property
    def identity(self) -> TargetIdentity: ...

    @property
    def capabilities(self) -> frozenset[Capability]: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def images(self) -> ImageFormat | None:
        """None from a target without the capability IMAGES."""
        ...

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The model layer of every attention call of a forward, in call order (= of every cache)."""
        ...

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Of every attention layer, as many and in that order: how many keys a token may see there, its own included
        (the window counts absolute positions); None for all."""
        ...

    @property
    def rules(self) -> tuple[CacheRule | None, ...]:
        """Of every attention layer, as many and in that order: what its cache forgets by itself; None for nothing."""
        ...

    @property
    def row_storage(self) -> str:
        """How its caches store rows at first: ``rows``, or a QuantisedStorage."""
        ...

    @property
    def row_widths(self) -> tuple[tuple[int, int], ...]:
        """Of every attention layer, in that order: how many numbers are in a row of keys and of values; asked with the
        capability QUANTISE only."""
        ...

    def open(self, owners: tuple[Owner, ...]) -> Session: ...

    def renew(self) -> None:
        """Forget everything that earlier sessions may have left behind (build the model again)."""
        ...

    def counterpart(self) -> Target | None:
        """The same weights under the other mask policy; None if there is no such thing."""
        ...

    def witness(self, history: History) -> Expected:
        """The same weights in code that shares nothing with the target's; asked with the capability WITNESS only."""
        ...

    def cache_free(self, history: History) -> Expected:
        """The target's own model, called once, without a cache and with the masks given; asked with the capability
        CACHE_FREE only. What it raises is a finding."""
        ...
