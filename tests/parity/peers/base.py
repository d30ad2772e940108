"""What a peer is: an engine that we did not write, asked for logits of the same directory."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Protocol

import numpy as np

from tests.parity.cases import Case


class Engine(Protocol):
    """One loaded model and one sequence. ``routed``: router logits ``[tokens, E]`` of the expert layers, in the order
    of their calls; whoever reads it clears it."""

    routed: list[np.ndarray]

    def prefill(self) -> np.ndarray:
        """Logits ``[S, V]`` of the whole prompt in one forward, its cache filled."""

    def step(self, token: int) -> np.ndarray:
        """Logits ``[V]`` behind one more token."""


class Peer(Protocol):
    """One published implementation. ``needs``: packages that must be installed; the first one is the engine, whose
    version is shown. ``mended``: known failures that we repair in it, to compare what lies behind them."""

    name: str
    needs: tuple[str, ...]
    mended: frozenset[str]

    def modalities(self, family: str) -> tuple[str, ...]:
        """What it can be asked of a family; empty for a family that it does not have."""

    def adapt(self, case: Case) -> Case:
        """The case as this peer is asked; most take it as it is."""

    def open(self, case: Case, folder: Path) -> Engine:
        """Make the directory ``folder``, which both sides load, and load it. Whatever this or the engine raises is a
        refusal."""


def missing(peer: Peer) -> list[str]:
    """What of a peer's needs is not installed."""
    return [package for package in peer.needs if version(package) is None]


def version(package: str) -> str | None:
    """The installed version; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
