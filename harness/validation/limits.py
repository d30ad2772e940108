"""What a validation could not show, in sentences made from what was run."""

from __future__ import annotations

from collections.abc import Mapping

from harness.validation.engines import Engine
from harness.validation.judged import CACHE_FREE, WITNESS
from harness.validation.plan import Plan


def limits(engine: Engine, plan: Plan, left_out: Mapping[str, str]) -> list[str]:
    """Most important first; never empty, for some engine and some device it always was. The engine has been loaded."""
    first, *others = engine.limits()
    said = [
        first,
        *(f"{name} was not judged: {why}." for name, why in left_out.items()),
    ]
    if WITNESS in left_out and CACHE_FREE in left_out:
        said.append(
            f"In {engine.computes_in}{' with packed weights' if engine.describe()['quantisation'] else ''} "
            "not all logits were compared with an independent computation: that they are finite and repeat themselves "
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
