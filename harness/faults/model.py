"""What a planted bug is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Fault:
    """A bug that can be switched on around a campaign.

    ``breaks``: id of the property that must find it; None for a harmless variation, which no property may report.
    ``source``: the public report that it is modelled on, or "" for one of our own.  ``plant()``: a context manager;
    while it is open the reference engine has the bug.  ``shown_on(target)``: can it show there at all?
    """

    id: str
    summary: str
    breaks: str | None
    plant: Callable[[], AbstractContextManager[None]]
    source: str = ""
    shown_on: Callable[[Any], bool] = lambda target: True
