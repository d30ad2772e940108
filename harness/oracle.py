"""What must be visible, from the ledger alone.

The visibility matrix of a forward is built from absolute positions, never from offsets, lengths or any cache code:
token i sees token j if j was held when i was processed, or came earlier in the same chunk, or is i itself; and, on a
layer with a sliding window of w, if also i - j < w.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from harness.ledger import Append
from harness.rules import CacheRule
from harness.target import PromptInput

PADDING = -1
"""In place of a position: a slot of a batch that holds no key of this row."""


def key_positions(append: Append) -> np.ndarray[Any, Any]:
    """Absolute positions of the keys of a forward in slot order: what was held, then the new tokens; in a batch with
    padding (PADDING) before and behind. [K] int64."""
    pads = [np.full(count, PADDING, np.int64) for count in (append.padding, append.behind)]
    return np.concatenate([pads[0], np.asarray(append.held, np.int64), np.asarray(append.positions, np.int64), pads[1]])


def of_layer(append: Append, rule: CacheRule | None) -> Append:
    """The same forward on a layer whose cache has this rule: it held less, and so did other rows."""
    if rule is None:
        return append
    padding = dict(append.ruled).get(rule, append.padding)
    return replace(append, held=rule.seen_from(append.positions.start, append.held), padding=padding)


def visible_set(append: Append, window: int | None = None, rule: CacheRule | None = None) -> np.ndarray[Any, Any]:
    """Boolean [l, K]: may new token i see the key in slot j, on a layer with this window (in tokens, >= 1; None: none)
    and with a cache of this rule?

    Everything held is older than every new token, so "held, or earlier in the chunk, or itself" is one comparison of
    absolute positions.  The window is another, of the distance between them, whatever was trimmed in between: it is the
    distance that RoPE shows.
    """
    keys = key_positions(append)[None, :]
    behind: np.ndarray[Any, Any] = np.asarray(append.positions, np.int64)[:, None] - keys
    visible: np.ndarray[Any, Any] = (behind >= 0) & (keys != PADDING)
    if rule is not None:
        visible &= _shown(rule, np.asarray(append.positions, np.int64)[:, None], keys)
    return visible if window is None else visible & (behind < window)


def _shown(rule: CacheRule, queries: np.ndarray[Any, Any], keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``rule.shows`` of arrays of positions that broadcast."""
    shown: np.ndarray[Any, Any] = np.broadcast_to(np.True_, np.broadcast_shapes(queries.shape, keys.shape))
    if rule.window is not None:
        shown = shown & ((keys < rule.sinks) | (keys > queries - (rule.window - rule.sinks)))
    return shown if rule.chunk is None else shown & (keys // rule.chunk == queries // rule.chunk)


@dataclass(frozen=True, eq=False)
class History:
    """Every token that a program ever processed, of all its sequences, in order: the input of one forward without any
    cache. Tokens that were trimmed or rolled back stay in it; whoever came later does not see them.

    ``tokens``, ``positions`` (absolute): [S]; ``places``: M-RoPE ids [3, S]; ``visible``: bool [S, S], may row i see
    column j on a layer without a window? ``prompts``: those with images; ``prompt_of`` [S]: the index of the one that a
    token belongs to (it stands there at its position), -1 for text behind or without one.

    ``storages`` [S]: as what the rows of a token are read. One that was cached as given and quantised later stands here
    again behind itself, with its rows as they are read then; what it sees is what the token saw. ``itself`` [S]: where
    the token stands as it was processed.
    """

    tokens: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    places: np.ndarray[Any, Any]
    visible: np.ndarray[Any, Any]
    prompts: tuple[PromptInput, ...]
    prompt_of: np.ndarray[Any, Any]
    storages: np.ndarray[Any, Any]
    itself: np.ndarray[Any, Any]

    @property
    def processed(self) -> np.ndarray[Any, Any]:
        """Where the tokens of the run stand, by number."""
        return np.unique(self.itself)

    def of_run(self, expected: Expected) -> Expected:
        """What is expected of the tokens of the run alone."""
        rows = self.processed
        choice, rounding = (None if gap is None else gap[rows] for gap in (expected.choice_gap, expected.rounding_gap))
        return Expected(expected.logits[rows], choice, rounding, expected.dtype)

    def shown(self, window: int | None, rule: CacheRule | None = None) -> np.ndarray[Any, Any]:
        """``visible`` on a layer with this window (of positions, the token's own included) and a cache of this rule."""
        seen = self.visible
        if window is not None:
            seen = seen & (self.positions[:, None] - self.positions[None] < window)
        return seen if rule is None else seen & _shown(rule, self.positions[:, None], self.positions[None])


@dataclass(frozen=True, eq=False)
class Expected:
    """What the logits [S, vocab] of a History should be. ``dtype``: what the target computes in.

    Two things may go either way by rounding alone. ``choice_gap`` [S]: how near the nearest choice of experts was, in
    softmax scores, among all that the token rests on (its own, and those of the tokens that it sees, layer by layer);
    ``rounding_gap`` [S]: the same for the rounding of a quantised cache, in steps of 1/127 of what it spans. None: not
    known, or there is no such thing.
    """

    logits: np.ndarray[Any, Any]
    choice_gap: np.ndarray[Any, Any] | None = None
    rounding_gap: np.ndarray[Any, Any] | None = None
    dtype: str = "float32"
