"""The input of the witnesses: everything that a run processed, as one forward without a cache.

A cache, chunks, trims and rollbacks decide one thing only, which tokens a token could see when it was processed. So the
whole run is one list of tokens in the order in which they were processed, each with its absolute position, and a
visibility matrix: row i shows what was held when i came, what came before it in its chunk, and itself. Nothing is taken
out: a token that was rolled back is in nobody's row from then on (a rollback drops the newest, so whoever saw it went
with it), and one that was trimmed keeps its row, on which the rows behind it once rested. Sequences do not see each
other and stand in the same list.
"""

from __future__ import annotations

import numpy as np

from harness.execution import Execution, ForwardStep
from harness.oracle import History
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
    prompts: list[PromptInput] = []
    prompt_of = np.full(count, -1)
    for forward in forwards:
        new, held = forward.append.numbers, list(forward.append.held_numbers)
        visible[new.start : new.stop, held] = True
        visible[new.start : new.stop, new.start : new.stop] = np.tri(len(new), dtype=bool)
        if forward.prompt is not None:
            if not any(forward.prompt is known for known in prompts):
                prompts.append(forward.prompt)
            number = next(i for i, known in enumerate(prompts) if known is forward.prompt)
            prompt_of[new.start : new.start + forward.read] = number
    return History(
        tokens=np.concatenate([forward.seen.tokens for forward in forwards]).astype(np.int64),
        positions=np.concatenate([forward.append.positions for forward in forwards]).astype(np.int64),
        places=np.concatenate([forward.append.places for forward in forwards]).astype(np.int64).T,
        visible=visible,
        prompts=tuple(prompts),
        prompt_of=prompt_of,
    )
