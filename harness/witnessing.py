"""The input of the witnesses: everything that a run processed, as one forward without a cache.

A cache, chunks, trims and rollbacks decide one thing only, which tokens a token could see when it was processed. So the
whole run is one list of tokens in the order in which they were processed, each with its absolute position, and a
visibility matrix: row i shows what was held when i came, what came before it in its chunk, and itself. Nothing is taken
out: a token that was rolled back is in nobody's row from then on (a rollback drops the newest, so whoever saw it went
with it), and one that was trimmed keeps its row, on which the rows behind it once rested. Sequences do not see each
other and stand in the same list.

A sequence that is quantised reads from then on other rows than those that it was given, of which its older tokens knew
nothing. So those older tokens are there twice: see ``History``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.execution import Execution
from harness.oracle import History
from harness.steps import ForwardStep
from harness.target import PromptInput


def completed(run: Execution) -> list[ForwardStep]:
    """The forwards that gave logits; an error ends a run, so these are all before it."""
    return [forward for step in run.steps for forward in step.forwards if forward.seen.logits is not None]


def history(run: Execution) -> History | None:
    """None for a run without a forward that completed."""
    forwards = completed(run)
    if not forwards:
        return None
    count = forwards[-1].append.numbers.stop
    visible = np.zeros((count, count), bool)
    storages = np.full(count, forwards[0].append.storage, dtype="<U16")
    prompts: list[PromptInput] = []
    prompt_of = np.full(count, -1)
    for forward in forwards:
        new, held = forward.append.numbers, list(forward.append.held_numbers)
        visible[new.start : new.stop, held] = True
        visible[new.start : new.stop, new.start : new.stop] = np.tri(len(new), dtype=bool)
        storages[new.start : new.stop] = forward.append.storage
        if forward.prompt is not None:
            if not any(forward.prompt is known for known in prompts):
                prompts.append(forward.prompt)
            number = next(i for i, known in enumerate(prompts) if known is forward.prompt)
            prompt_of[new.start : new.start + forward.read] = number
    number, read_as = _readings(visible, storages)
    return History(
        tokens=np.concatenate([forward.seen.tokens for forward in forwards]).astype(np.int64)[number],
        positions=np.concatenate([forward.append.positions for forward in forwards]).astype(np.int64)[number],
        places=np.concatenate([forward.append.places for forward in forwards]).astype(np.int64).T[:, number],
        visible=visible[np.ix_(number, number)] & (storages[number][:, None] == read_as),
        prompts=tuple(prompts),
        prompt_of=prompt_of[number],
        storages=read_as,
        itself=np.searchsorted(number, number),  # the first of those with one number
    )


def _readings(visible: np.ndarray[Any, Any], storages: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """The numbers of the tokens in the order of a History, and as what their rows are read there."""
    number, read_as = np.arange(len(storages)), storages
    for storage in sorted(set(storages) - {"rows"}):
        again = np.flatnonzero((storages == "rows") & visible[storages == storage].any(axis=0))
        number, read_as = np.append(number, again), np.append(read_as, np.full(len(again), storage, storages.dtype))
    order = np.argsort(number, kind="stable")
    return number[order], read_as[order]
