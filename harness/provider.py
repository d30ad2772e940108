"""How Hypothesis draws programs for campaigns: every one afresh, from the seed and nothing else."""

from __future__ import annotations

from typing import Any

from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider

#: The name of the backend, in ``hypothesis.settings``.
BACKEND = "kv-harness"


class Afresh(HypothesisProvider):
    """The choices of Hypothesis itself, without what it adds for tests of other kinds.

    As a backend of its own it is never asked for variations of the program before, which is most of what the default
    one runs: five near copies behind every new program. A bug that needs two rare things at once is met two to four
    times as often by as many programs that have nothing in common.

    One draw in twenty of the default comes from the literals of whatever local modules happen to be loaded, so the same
    seed would give other programs in a checkout than in an installed copy. Our strategies name their edges themselves.
    """

    def _maybe_draw_constant(self, *_: Any, **__: Any) -> None:
        return None


AVAILABLE_PROVIDERS[BACKEND] = Afresh
