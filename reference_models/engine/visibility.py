"""Which earlier keys a query sees, by absolute position: the rule of a cache that forgets by itself."""

from dataclasses import dataclass

import mlx.core as mx

_LARGEST = 2**31 - 1  # of int32, in which positions are compared


@dataclass(frozen=True)
class VisibilityRule:
    """Query q sees key p iff ``p <= q`` and, where these are set, ``p < sinks or p > q - (window - sinks)`` and
    ``p // chunk == q // chunk``.

    A rule knows positions only. So it does not depend on how the tokens were cut into forwards, and a later query never
    sees an earlier key again that one before it had lost.

    Attributes:
        window: keys that a query sees at most, its own and the sinks included (sliding windows count so since Mistral
            7B, arXiv 2310.06825; the sinks are those of StreamingLLM, arXiv 2309.17453); None for no limit.
        sinks: the first positions of a sequence, seen for ever; fewer than ``window``.
        chunk: length of the pieces that do not see each other (chunked attention of Llama 4); None for one piece.
    """

    window: int | None = None
    sinks: int = 0
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Raise ValueError, naming the field, for a rule under which a query would not see its own key."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"a window counts the query's own key and must be >= 1, got window {self.window}")
        if self.sinks < 0 or (self.sinks and self.sinks >= (self.window or 0)):
            raise ValueError(f"sinks must be >= 0 and fewer than the window ({self.window}), got sinks {self.sinks}")
        if self.chunk is not None and self.chunk < 1:
            raise ValueError(f"a chunk must have at least one token, got chunk {self.chunk}")

    def before(self, query: int) -> tuple[range, ...]:
        """Positions below ``query`` that it sees: ranges, ascending, apart from each other, none empty."""
        first = 0 if self.chunk is None else query - query % self.chunk
        if self.window is not None:
            first = max(first, query - (self.window - self.sinks) + 1)
        sinks = range(min(self.sinks, query))
        return tuple(part for part in (sinks, range(max(first, self.sinks), query)) if part)

    def mask(self, queries: mx.array, keys: mx.array) -> mx.array:
        """bool ``[.., l, K]``: which of the positions ``keys``, int32 ``[.., K]``, each of ``queries``, int32
        ``[.., l]``, sees."""
        query, keys = queries[..., None], keys[..., None, :]
        visible = keys <= query
        if self.window is not None:
            near = keys > query - min(self.window - self.sinks, _LARGEST)
            visible = visible & (near | (keys < self.sinks))
        if self.chunk is not None:
            chunk = min(self.chunk, _LARGEST)
            visible = visible & (keys // chunk == query // chunk)
        return visible


EVERYTHING = VisibilityRule()
"""The rule of a cache that hides nothing: a query sees whatever is held."""
