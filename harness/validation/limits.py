"""What a validation could not show, in sentences made from what was run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.operations import tokens_of
from harness.validation.engine import Engine
from harness.validation.judged import CACHE_FREE, WITNESS
from harness.validation.plan import Plan, Planned
from harness.validation.verdict import Results


def limits(
    engine: Engine,
    told: Sequence[str],
    plan: Plan,
    left_out: Mapping[str, str],
    results: Results,
    other: tuple[Engine, str] | None = None,
) -> list[str]:
    """Most important first; never empty, for some engine and some device it always was. ``told``: what
    ``engine.limits`` gave; ``other``: the engine of the before side, where that is another one, and its policy."""
    first, *others = told
    said = [
        first,
        *(() if other is None else _of_two(engine, *other)),
        *unfinished(plan, results),
        *(f"{name} was not judged: {why}." for name, why in left_out.items()),
    ]
    if WITNESS in left_out and CACHE_FREE in left_out:
        said.append(
            f"In {engine.computes_in}{' with packed weights' if engine.describe()['quantisation'] else ''} "
            "no logits were compared with an independent computation: that they are finite and repeat themselves "
            "was judged, not that they are right."
        )
    elif WITNESS in left_out:
        said.append(
            "Logits were compared with those of the same model without a cache, not with another implementation: what "
            "the model gets wrong with and without a cache is not seen."
        )
    if (why := engine.no_images) is not None:
        said.append(f"No prompt held an image: {why}.")
    else:
        said.append(
            "Images: one still of random pixels at the beginning of a prompt, trimmed by hand and not by the bound; no "
            "video."
        )
    said += others
    asked = plan.asked
    said += [
        f"One prompt of {asked.tokens:,} tokens, whose ids are spread over the vocabulary and are no text.",
        "One sequence: no batch, no prefix that is shared, no snapshot; no tokenizer and no sampling.",
        f"P={asked.max_kv_size} and C={asked.prefill_chunk_size} alone; sinks are kept in one trim that is no bound's.",
        "Rows are stored as they were computed, not quantised.",
        f"One device ({engine.device}); others round differently.",
    ]
    return said


def _of_two(engine: Engine, other: Engine, policy: str) -> Iterator[str]:
    """What a comparison of two engines leaves open."""
    yield (
        f"The before side ran on another engine ({other.phrase_of(policy)}): logits were not compared byte for byte, "
        "for two engines round differently, but greedy tokens were, where both are decided; where those differ, "
        "nothing says which of the two is wrong."
    )
    if other.own_word:
        yield (
            "Which weights the before side serves is the word of its engine, but for the greedy tokens that were "
            "compared."
        )
    if other.own_word or engine.own_word or other.computes_in != engine.computes_in:
        yield (
            f"The two may compute in other types (after: {engine.computes_in}; before: {other.computes_in}): a greedy "
            "token that is barely decided can differ by that alone."
        )


def unfinished(plan: Plan, results: Results) -> Iterator[str]:
    """Every program of every side that did not get to its end, how far it got and why; and what ``before`` never ran,
    for a comparison goes no further than both sides."""
    for side, programs in results.items():
        for planned in plan.programs:
            if planned.name in programs:
                yield from _cut(side, planned, programs[planned.name])
            elif side == "before":
                yield f"{planned.name} was not run on the before side: what that runs on cannot do it."


def _cut(side: str, planned: Planned, result: Mapping[str, Any]) -> Iterator[str]:
    if (stopped := result["stopped"]) is None:
        return
    operations, number = planned.program.operations, stopped["operation"]
    where = "in" if tokens_of(operations[number - 1]) else "behind"
    why = stopped["why"].rstrip(".")
    yield (
        f"{planned.name} stopped on the {side} side {where} forward {result['forwards']} of {planned.forwards} "
        f"(operation {number} of {len(operations)}, {stopped['text']}): {why:.200}. What follows was not run there."
    )
