"""What a planted bug is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

Layer = Literal["mask", "positions", "attention", "cache", "pool", "batch", "model", "images"]
"""Where a bug lives: in how masks or positions are made, in attention, in a cache, in what keeps the caches of many
sequences, in a cache of a batch, in the rest of a model, or in what is kept of images."""


@dataclass(frozen=True)
class Fault:
    """A bug that can be switched on around a campaign.

    ``breaks``: id of the property that must find it; None for a harmless variation, which no property may report.
    ``source``: the public report that it is modelled on, ``owner/name#number``, and in brackets what that report shows
    or in what the planted bug differs from it; "" for one of our own.  ``plant()``: a context manager; while it is open
    the reference engine has the bug.  ``shown_on(target)``: can it show there at all?  ``layer``: the one it lives in;
    None for a variation.
    """

    id: str
    summary: str
    breaks: str | None
    plant: Callable[[], AbstractContextManager[None]]
    source: str = ""
    shown_on: Callable[[Any], bool] = lambda target: True
    layer: Layer | None = None
