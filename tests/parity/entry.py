"""What an entry of ``limitations`` is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from packaging.specifiers import SpecifierSet

from tests.parity.cases import Case
from tests.parity.peers.base import Peer

Kind = Literal["limitation", "known failure"]


@dataclass(frozen=True)
class Limitation:
    """One entry.

    ``peer``: its package. ``condition``: ``holds`` in words. ``why``: traced in the peer's source. ``span``: the
    least and the most that a known failure may differ, in standard deviations of the logits; wider than what was
    measured, and another failure outside. ``seen``: whether a case that ``holds`` must show it; one that need not (an
    angle too small to matter) is neither compared nor held against the entry.
    """

    id: str
    peer: str
    families: tuple[str, ...]
    versions: str
    kind: Kind
    condition: str
    holds: Callable[[Case], bool]
    why: str
    says: str = ""
    span: tuple[float, float] | None = None
    seen: Callable[[Case], bool] = lambda case: True

    def applies(self, peer: Peer, version: str, case: Case) -> bool:
        """Whether this peer should fail on this case."""
        return (
            self.peer == peer.needs[0]
            and self.id not in peer.mended
            and case.family in self.families
            and SpecifierSet(self.versions).contains(version, prereleases=True)
            and self.holds(case)
        )
