"""Which properties a validation claims to judge, and why not the others."""

from __future__ import annotations

import properties
from harness.judging import Property
from harness.target import Capability, Target
from harness.validation.plan import GROWTH, Plan

CHECKPOINT = "checkpoint"
"""The kind of its targets."""
CONTROL = "mask_key_axis_equals_live_keys"
"""What the offset mask policy must break behind every trim."""
COMPLETES = "every_operation_completes"
NO_FIT = "[broadcast_shapes]"
"""What MLX says of a mask that does not fit."""
A_A = "same_program_same_bytes"
"""Without it a comparison of two sides cannot tell a difference from noise."""
OF_MASKS = (CONTROL, "mask_shows_exactly_the_visible_set")
"""What a wrong mask breaks: by its width, by its content."""
_WATCHED = (*OF_MASKS, COMPLETES)
"""What sides are asked that are not judged: where their masks break."""
EXACT = (
    CONTROL,
    "keys_equal_ledger_live_length",
    "mask_shows_exactly_the_visible_set",
    "positions_are_absolute",
    "trim_reports_what_it_removed",
    "cached_rows_stay_what_they_were",
    "memory_is_given_back",
    "every_operation_completes",
    "every_forward_gives_finite_logits",
    A_A,
    "operations_are_pure",
    "untrimmed_outputs_are_byte_identical",
)
"""They hold to the bit, whatever the weights are stored in."""
CACHE_FREE, WITNESS = "outputs_equal_the_cache_free_forward", "outputs_equal_the_witness"
COMPARED = (
    "attention_equals_float64",
    CACHE_FREE,
    WITNESS,
    "rollback_equals_never_speculated",
    "chunks_equal_one_shot",
)
"""They compare numbers to a tolerance."""
MEMORY = "memory_is_given_back"


def judgeable(target: Target) -> tuple[Property, ...]:
    """What can be asked of a target whose trace is replayed: of a checkpoint for whose logits no tolerance is known,
    the properties that compare none."""
    if target.identity.kind != CHECKPOINT or Capability.CACHE_FREE in target.capabilities:
        return properties.ALL
    return tuple(prop for prop in properties.ALL if prop.id in EXACT)


def watched(target: Target, compared: bool) -> tuple[Property, ...]:
    """What a side is asked that is not judged. ``compared``: the judged one is compared with it, so that it must
    repeat itself as well, which costs each of its programs once more."""
    asked = (properties.BY_ID[name] for name in (*_WATCHED, *([A_A] if compared else [])))
    return tuple(prop for prop in asked if prop.needs <= target.capabilities)


def claimed(target: Target, plan: Plan, compared: bool) -> tuple[tuple[Property, ...], dict[str, str]]:
    """The properties that this plan can decide on this target, in the order in which they are judged, and of all
    others by their ids why they are left out."""
    chosen, left_out = [], {}
    for prop in properties.ALL:
        missing = sorted(prop.needs - target.capabilities)
        if prop.id not in EXACT + COMPARED:
            left_out[prop.id] = "the plan has no such operation"
        elif prop.id in COMPARED and not compared:
            left_out[prop.id] = "its tolerance is known only for weights in float32 that are not packed"
        elif prop.id == MEMORY and not plan.gives_back:
            left_out[prop.id] = f"no trim leaves {GROWTH} keys less than there were; more --tokens would"
        elif missing:
            left_out[prop.id] = f"the target lacks: {', '.join(missing)}"
        elif (why := prop.never_decisive(target)) is not None:
            left_out[prop.id] = why
        else:
            chosen.append(prop)
    return tuple(chosen), left_out
