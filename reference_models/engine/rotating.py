"""A cache of a sliding window: the newest keys, and sinks in front of them."""

from typing import Any

from .ruled import RuledKVCache
from .runs import found
from .side import Storage
from .visibility import VisibilityRule


class RotatingKVCache(RuledKVCache):
    """Query q sees key p iff ``p <= q`` and (``p < sinks`` or ``p > q - (window - sinks)``).

    An append of several tokens keeps, by ascending position, the sinks and the last ``window - sinks - 1`` other old
    keys, and puts all the new ones behind them: more than ``window`` slots may be in use then, and the next append cuts
    first. A single token takes a slot of its own until ``window`` are in use; from then on it takes the slot of the
    oldest key that is no sink, so the slots are a ring and say nothing about the order of positions.

    Attributes:
        window: keys that a query sees at most, in tokens, its own and the sinks included.
        sinks: the first positions of a sequence, which stay.
    """

    def __init__(self, window: int, sinks: int = 0, storage: Storage = "rows") -> None:
        """Make an empty cache. Raises ValueError unless ``0 <= sinks < window``, or for an unknown ``storage``."""
        super().__init__(VisibilityRule(window, sinks), window, storage)
        self.window, self.sinks = window, sinks

    def _overwritten(self, n: int) -> int | None:
        if n != 1 or self.held_len != self.window:
            return None
        # Beside the sinks, positions are consecutive up to the newest. So a full ring holds just one key that the next
        # token does not see: the oldest.
        oldest = self.offset - (self.window - self.sinks)
        return next((slot for slot, _ in found(self._held, [range(oldest, oldest + 1)])), None)

    @classmethod
    def _fresh(cls, metadata: dict[str, Any]) -> "RotatingKVCache":
        return cls(metadata["window"], metadata["sinks"], metadata["storage"])

    def _made_by(self) -> dict[str, Any]:
        return {"kind": "rotating", "window": self.window, "sinks": self.sinks}
