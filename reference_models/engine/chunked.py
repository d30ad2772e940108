"""A cache of chunked attention: what lies in an earlier chunk is seen no more."""

from typing import Any

from .ruled import RuledKVCache
from .side import Storage
from .visibility import VisibilityRule


class ChunkedKVCache(RuledKVCache):
    """Query q sees key p iff ``p <= q`` and ``p // chunk == q // chunk`` (positions, so the cuts do not matter).

    At the start of an append the keys of earlier chunks than that of the first new token go. The new tokens may span
    several chunks; so at most ``chunk - 1 + l`` slots are in use. A rollback to a place in an earlier chunk is possible
    only while its keys are there, and always to the very start of a chunk, where nothing is seen.

    Attributes:
        chunk: length of the chunks, in tokens; chunk i has the positions ``[i * chunk, (i + 1) * chunk)``.
    """

    def __init__(self, chunk: int, storage: Storage = "rows") -> None:
        """Make an empty cache. Raises ValueError unless ``chunk >= 1``, or for an unknown ``storage``."""
        super().__init__(VisibilityRule(chunk=chunk), chunk, storage)
        self.chunk = chunk

    @classmethod
    def _fresh(cls, metadata: dict[str, Any]) -> "ChunkedKVCache":
        return cls(metadata["chunk"], metadata["storage"])

    def _made_by(self) -> dict[str, Any]:
        return {"kind": "chunked", "chunk": self.chunk}
