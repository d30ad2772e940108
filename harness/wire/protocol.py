"""What goes over the wire: the messages, what they hold and what answers them. PROTOCOL.md explains them.

A request is ``{"id": n, "do": message, ...}``, an answer ``{"id": n, ...}``, each one line of JSON.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from harness.calls import AttentionCall, PositionCall
from harness.capability import Capability
from harness.rules import CacheRule
from harness.target import (
    ArgumentsObservation,
    CacheLengths,
    CacheMemory,
    CacheRows,
    CopyObservation,
    ImageFormat,
    PromptInput,
    RemovalObservation,
)
from harness.wire.codec import CodecError

VERSION = 1
Policy = Literal["live", "offset"]

#: Witnesses of the harness stay in its process, and so does what is measured in it; quantising in mid-program is not
#: asked over the wire.
_NOT_OVER_THE_WIRE = (Capability.WITNESS, Capability.QUANTISE, Capability.INT8, Capability.FOOTPRINT)
#: What a worker may say that it can, by its name on the wire.
CAPABILITIES = {each.name.lower(): each for each in Capability if each not in _NOT_OVER_THE_WIRE}


@dataclass(frozen=True)
class Description:
    """The answer to ``hello``. ``attention_layers``, ``windows``, ``rules``: as in ``harness.target.Target``; ``[]``
    for windows or rules: none anywhere. ``policies``: the mask policies that it can open a session with; ``storage``:
    what its caches hold, ``rows``, ``int8`` or another word; ``version``: of the engine, to read; ``images``: how it
    wants them, with the capability of that name and only then."""

    protocol: int
    family: str
    vocab_size: int
    attention_layers: tuple[int, ...]
    capabilities: tuple[str, ...]
    variant: str = "default"
    windows: tuple[int | None, ...] = ()
    rules: tuple[CacheRule | None, ...] = ()
    policies: tuple[Policy, ...] = ("live",)
    storage: str = "rows"
    device: str = "its own process"
    version: str = ""
    images: ImageFormat | None = None


@dataclass(frozen=True)
class TellingAnswer:
    """What the caches of one sequence say, one entry per cache each."""

    lengths: tuple[CacheLengths, ...] = ()
    rows: tuple[CacheRows, ...] = ()
    memory: tuple[CacheMemory, ...] = ()


@dataclass(frozen=True, eq=False)
class ForwardAnswer:
    """A ``ForwardObservation`` without its tokens, which the asker knows."""

    logits: np.ndarray[Any, Any] | None = None
    attention: tuple[AttentionCall, ...] = ()
    positions: tuple[PositionCall, ...] = ()
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class BatchAnswer:
    """One for each row."""

    rows: tuple[ForwardAnswer, ...]


@dataclass(frozen=True, eq=False)
class CacheFreeAnswer:
    """An ``oracle.Expected``, or what the model raised."""

    logits: np.ndarray[Any, Any] | None = None
    choice_gap: np.ndarray[Any, Any] | None = None
    rounding_gap: np.ndarray[Any, Any] | None = None
    dtype: str = "float32"
    error: str | None = None


@dataclass(frozen=True)
class NoAnswer:
    """Nothing but that it is done."""


#: Message -> (its fields with their types, what answers it, the capability that it needs). Any but the first may also
#: have the field ``tell``: the answer then has ``told``, a list of TellingAnswers, one for every sequence.
MESSAGES: dict[str, tuple[dict[str, Any], Any, Capability | None]] = {
    "hello": ({"protocol": int}, Description, None),
    "open": (
        {"owners": tuple[Literal["pool", "model"], ...], "policy": Policy, "attention": bool, "arguments": bool},
        NoAnswer,
        None,
    ),
    "prompt": ({"sequence": int, "prompt": PromptInput}, NoAnswer, Capability.IMAGES),
    "forward": ({"sequence": int, "tokens": tuple[int, ...]}, ForwardAnswer, None),
    "trim_front": ({"sequence": int, "n": int, "keep": int}, RemovalObservation, Capability.FRONT_TRIM),
    "rollback": ({"sequence": int, "n": int}, RemovalObservation, Capability.ROLLBACK),
    "enforce": (
        {
            "sequence": int,
            "limit": int,
            "generation": Literal["trim", "sinks", "shift"],
            "keep": int,
            "n_discard": int,
        },
        RemovalObservation,
        Capability.ENFORCE,
    ),
    "snapshot": ({"sequence": int, "slot": int}, CopyObservation, Capability.SNAPSHOT),
    "restore": ({"sequence": int, "slot": int}, CopyObservation, Capability.SNAPSHOT),
    "fork": ({"sequence": int, "into": int}, CopyObservation, Capability.FORK),
    "save_and_load": ({"sequence": int}, CopyObservation, Capability.SAVE_LOAD),
    "reset": ({"sequence": int}, CopyObservation, Capability.RESET),
    "batch": ({"rows": tuple[int, ...]}, CopyObservation, Capability.BATCH),
    "forward_batch": ({"tokens": tuple[tuple[int, ...], ...]}, BatchAnswer, Capability.BATCH),
    "tell": ({}, NoAnswer, None),
    "arguments": ({}, ArgumentsObservation, Capability.ARGUMENTS),
    "cache_free": (
        {"tokens": np.ndarray, "positions": np.ndarray, "visible": np.ndarray},
        CacheFreeAnswer,
        Capability.CACHE_FREE,
    ),
    "cache_free_of_prompts": (
        {
            "tokens": np.ndarray,
            "positions": np.ndarray,
            "visible": np.ndarray,
            "places": np.ndarray,
            "prompt_of": np.ndarray,
            "prompts": tuple[PromptInput, ...],
        },
        CacheFreeAnswer,
        Capability.IMAGES,
    ),
}


def line_of(message: dict[str, Any]) -> bytes:
    """Without its newline."""
    return json.dumps(message, separators=(",", ":")).encode()


def message_of(line: bytes) -> dict[str, Any]:
    """The object that a line holds. Raises CodecError."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CodecError(f"no line of JSON: {line[:60]!r}") from error
    if not isinstance(data, dict) or type(data.get("id")) is not int:
        raise CodecError(f"no object with an id: {line[:60]!r}")
    return data
